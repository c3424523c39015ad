"""What engines in the worker's process share: `generate`, model cards, sampling, request states and KV events."""
