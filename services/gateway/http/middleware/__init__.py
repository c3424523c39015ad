"""ASGI middleware of the gateway; `services.gateway.app.application.add_middleware` lists it in order."""
