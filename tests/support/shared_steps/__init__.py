"""Rigs of the shared steps: each runs one step with rows of many streams and injects a failure into one row."""
