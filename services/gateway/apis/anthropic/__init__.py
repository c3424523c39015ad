"""Anthropic's Messages API: requests, translation to chat requests, and responses."""
