"""Outputs of the mock engine that satisfy a structured output constraint."""
