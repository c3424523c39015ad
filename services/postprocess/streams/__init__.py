"""Streams: detokenization, stop conditions, parsing and resumption of generations."""
