"""Parsers of reasoning between tags, alone and before calls."""
