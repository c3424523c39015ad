"""One suite with every profile that can be had here, and one as it comes without any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.net.ports import free_port
from tests.support.servers import compose_suite
from tests.support.servers.compose_suite import Suite

LOGS = Path(__file__).parents[2] / "build"
OTHERS = {
    "balancer": "SLUICE_HAPROXY_IMAGE",
    "prometheus": "SLUICE_PROMETHEUS_IMAGE",
    "traces": "SLUICE_TRACES_IMAGE",
    "grafana": "SLUICE_GRAFANA_IMAGE",
}
FOUND: dict[str, tuple[str, str]] = {}
"""What runs as each service that is not ours, of those that a test has used."""


@pytest.fixture(scope="session")
def built() -> None:
    """The images of the services."""
    compose_suite.build()


@pytest.fixture(scope="session")
def images(built: None) -> dict[str, tuple[str, str]]:
    """What runs as each service that is not ours, and whether it is the public image."""
    return {service: _image(service) for service in OTHERS}


@pytest.fixture(scope="module")
def plain(built: None) -> Iterator[Suite]:
    """`docker compose up`, without profiles."""
    yield from _running(Suite(variables={"SLUICE_WORKER_ENGINE_ARGS": "media=image"}), LOGS / "compose-plain.log")


@pytest.fixture(scope="session")
def suite(images: dict[str, tuple[str, str]]) -> Iterator[Suite]:
    """All profiles without accelerators."""
    missing = [service for service, (name, _) in images.items() if not name]
    # Compose pulls also what is not started, so what is missing gets the name of something that is there.
    some = next(name for name, _ in images.values() if name)
    variables = {OTHERS[service]: name or some for service, (name, _) in images.items()}
    variables |= {f"SLUICE_{port}_PORT": str(free_port()) for port in ("PROMETHEUS", "TRACES", "GRAFANA")}
    made = Suite(("balancer", "redis-ha", "observability"), variables, hidden=missing)
    yield from _running(made, LOGS / "compose-profiles.log")


@pytest.fixture(scope="module")
def fronted(built: None) -> Iterator[Suite]:
    """The profile envoy with two gateways, two workers and one router."""
    name, _ = _image("envoy")
    made = Suite(("envoy",), {"SLUICE_ENVOY_IMAGE": name, "SLUICE_GATEWAYS": "2", "SLUICE_WORKERS": "2"})
    yield from _running(made, LOGS / "compose-envoy.log")


def _image(service: str) -> tuple[str, str]:
    FOUND[service] = compose_suite.image(service)
    return FOUND[service]


def _running(made: Suite, log: Path) -> Iterator[Suite]:
    try:
        made.up()
        yield made
    finally:
        made.down(log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was the real thing."""
    if not FOUND:
        return
    terminalreporter.section("images that are not ours")
    for service, (name, kind) in FOUND.items():
        terminalreporter.write_line(f"{service}: {kind}{f', {name}' if name else ', not started'}")
