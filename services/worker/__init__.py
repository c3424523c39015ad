"""The worker: hosts one engine; token ids in, token ids out."""
