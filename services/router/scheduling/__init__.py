"""Scheduling: policies, costs, admission, session affinity and disaggregated prefill."""
