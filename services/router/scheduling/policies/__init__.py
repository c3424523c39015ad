"""Routing policies: the built-in ones, and those composed of filters, scorers and pickers in a file."""
