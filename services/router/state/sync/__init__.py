"""Synchronizes a replica's model states with the store, and tracks whether the store is available."""
