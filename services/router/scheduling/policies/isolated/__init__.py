"""The process that runs stages which are not built in, and its supervision."""
