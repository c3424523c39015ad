"""The block index: which rank holds which blocks, from events and from predictions."""
