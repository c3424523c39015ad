"""Parsers: what of a model's text is content, what reasoning, and what tool calls."""
