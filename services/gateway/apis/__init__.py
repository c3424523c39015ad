"""The HTTP APIs: their schemas, validation, endpoints and response objects."""
