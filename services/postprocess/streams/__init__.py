"""Streams: a detokenizer and a parser for each, fed in batches, with stop strings and resumption."""
