"""Independent statements of what is right: references that results are compared with."""
