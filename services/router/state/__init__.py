"""What replicas know and share: workers, their caches and reservations, the store of it, and its synchronization."""
