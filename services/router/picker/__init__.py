"""Endpoint picker: chooses endpoints for Envoy and the Gateway API inference extension, and books them exactly."""
