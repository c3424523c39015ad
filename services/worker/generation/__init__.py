"""One generation: the validation of its request, the sink of its response, and its span."""
