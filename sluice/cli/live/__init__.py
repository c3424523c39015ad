"""Commands that query a running suite: top, route, workers."""
