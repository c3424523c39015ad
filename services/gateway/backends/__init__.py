"""The services behind the gateway: their clients, the workers known, and which of them runs a request."""
