"""Clients that tests use."""
