"""Entry point of the gateway: `python -m services.gateway`."""

from __future__ import annotations

from services.common.observability import scrape_server as scraping
from services.common.observability import telemetry
from services.common.rpc.runner import run
from services.gateway.app.bootstrap import serve
from services.gateway.settings import GatewaySettings


def main() -> None:
    """Loads the settings and runs the gateway."""
    settings = GatewaySettings.load()
    if not settings.metrics_listen:
        telemetry.configure_metrics()  # the gateway serves /metrics itself
    scraping.health = lambda: {"status": "ok"}  # liveness only, as /health; /ready covers readiness
    run("gateway", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
