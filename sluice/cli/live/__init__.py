"""Commands that ask a running suite: top, route, workers."""
