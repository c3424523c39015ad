"""Clients of the services behind the gateway, which convert between gRPC messages and the gateway's data model."""
