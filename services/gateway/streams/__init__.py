"""Running generations: forwarding of tokens and text, migration, disaggregation, and the watchdog."""
