"""Keeps a replica's view of the models in step with the store, and notices when the store is away."""
