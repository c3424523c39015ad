"""The ASGI middleware of the gateway, listed in its order in `services.gateway.app`."""
