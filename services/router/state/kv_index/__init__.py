"""Block index: maps blocks to the ranks that hold them, from KV events and from predictions."""
