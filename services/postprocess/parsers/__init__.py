"""Parsers, which split a model's text into content, reasoning and tool calls."""
