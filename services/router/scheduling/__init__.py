"""Decides where a prompt runs: policies, costs, waiting, sessions, and prefill apart from decode."""
