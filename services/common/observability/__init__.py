"""Metrics, traces, the audit log, and their servers."""
