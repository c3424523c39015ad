"""The workers as the gateway sees them: the registry, its connections, and their checks."""
