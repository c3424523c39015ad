"""The metrics of preprocess."""
