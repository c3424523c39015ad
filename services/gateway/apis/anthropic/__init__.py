"""Anthropic's Messages API: what its requests say, and how answers are written."""
