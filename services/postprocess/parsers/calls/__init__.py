"""Parsers of tool calls, and what they are made of: bodies in JSON and between tags, names, types of arguments."""
