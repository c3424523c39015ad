"""Python packages beside the suite: engines and extensions."""
