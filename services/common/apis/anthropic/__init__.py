"""Prompts of the Messages API."""
