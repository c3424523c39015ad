"""Settings of a service, and the variables of OpenTelemetry."""
