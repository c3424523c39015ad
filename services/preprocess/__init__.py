"""Preprocess: turns requests into exactly the token ids that the engine itself would produce."""
