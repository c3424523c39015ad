"""HTTP/JSON API of the router: the calls of schedulers that use neither gRPC nor Python."""
