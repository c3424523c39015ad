"""Chat templates; those from clients and workers are rendered in child processes with limits."""
