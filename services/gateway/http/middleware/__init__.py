"""ASGI middleware of the gateway; `services.gateway.app.application.entrance` puts it in order."""
