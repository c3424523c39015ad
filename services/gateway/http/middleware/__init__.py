"""ASGI middleware of the gateway; `services.gateway.app.add_middleware` lists it in order."""
