"""Generations in progress: forwarding of tokens and text, migration, disaggregation and the worker watchdog."""
