"""gRPC: servers, channels, replicas with hedging and retries, and multiplexed calls."""
