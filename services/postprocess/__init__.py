"""Postprocess: token ids in; text out, never a broken character, and the end where a stop says so."""
