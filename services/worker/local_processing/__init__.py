"""Tokenization and detokenization in the worker process, for engines that accept and return token ids only."""
