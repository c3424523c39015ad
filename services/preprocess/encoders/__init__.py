"""Encoders from text to token ids, with the cache of segments."""
