"""Vocabularies and detokenizers: token ids to text."""
