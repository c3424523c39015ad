"""Scores, reranking and classification of texts by pooling models."""
