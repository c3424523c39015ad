"""The stages between a request and its stream: which run, in which order, and how plugins join them."""
