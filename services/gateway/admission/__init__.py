"""Who may ask, how much, and in which order: API keys, limits, and the line in front of a gateway that is full."""
