"""The live view: a page with the current state of the suite, and its event stream."""
