"""HTTP endpoints that operate the workers of a model."""
