"""HTTP without any API in particular: bodies, errors, event streams."""
