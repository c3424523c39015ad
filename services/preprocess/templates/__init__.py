"""Chat templates, rendered in limited child processes where they come from clients."""
