"""Code shared by all services: transport, settings, telemetry, errors and block hashes."""
