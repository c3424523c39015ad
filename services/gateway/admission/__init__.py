"""Admission of requests: API keys, their limits, and a fair queue while the gateway is full."""
