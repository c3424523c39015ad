"""Selection of the workers that run a request: by the router, by the client, or by a custom stage."""
