"""gRPC of the router: its service, the client of preprocess, and conversions of messages."""
