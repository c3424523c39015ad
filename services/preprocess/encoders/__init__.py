"""Encoders from text to token ids, with the segment cache."""
