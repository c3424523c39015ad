"""What every service needs and no service owns: transport, settings, telemetry, errors, block hashes."""
