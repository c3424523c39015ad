"""Prompts of the Responses API."""
