"""Network addresses and ports."""
