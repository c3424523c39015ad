"""The services behind the gateway. Only these files know gRPC messages."""
