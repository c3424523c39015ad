"""Tokenizers: implementations, loading, registry and generation defaults."""
