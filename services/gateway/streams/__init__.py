"""Generations in progress: their states, forwarding of tokens and text, migration, disaggregation, the watchdog."""
