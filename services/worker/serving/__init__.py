"""The worker's RPC service: admission, sessions, outgoing batches, control calls and health."""
