"""The gateway: serves the HTTP APIs and runs each request through the pipeline."""
