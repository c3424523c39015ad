"""Child processes that run custom parsers and parsers of engines, and their clients."""
