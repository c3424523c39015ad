"""Gateway: speaks HTTP to clients and conducts the pipeline behind it."""
