"""Metrics, traces, the audit log, and the servers that expose them."""
