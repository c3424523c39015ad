"""Engines, links and peers that behave as a test needs, mostly wrongly."""
