"""Scanners of text in pieces: markers, JSON, Python literals."""
