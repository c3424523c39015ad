"""Tokenizers of models: their loading, registry and generation defaults."""
