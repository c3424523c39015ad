"""Postprocess: converts token ids to text, applies stop conditions, and parses reasoning and tool calls."""
