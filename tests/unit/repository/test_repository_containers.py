import re
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT

SERVICES = ["gateway", "preprocess", "router", "postprocess", "worker"]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]


def stage(name: str) -> str:
    """The lines of one stage of the Dockerfile."""
    return next(part for part in re.split(r"(?m)^(?=FROM )", DOCKERFILE) if re.match(rf"FROM \S+ AS {name}\n", part))


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_its_service_unprivileged_and_says_how_it_is(service: str) -> None:
    lines = stage(service)
    assert "USER 10001:10001" in lines
    assert f"requirements/{service}.txt" in lines
    assert f'ENTRYPOINT ["python", "-m", "services.{service}"]' in lines
    assert "HEALTHCHECK" in lines
    assert lines.index("USER") > lines.rindex("RUN"), "what is installed belongs to root"


def test_whatever_an_image_installs_is_pinned() -> None:
    for line in re.findall(r"pip (?:install|wheel)[^\n]*", DOCKERFILE):
        assert "--require-hashes" in line or "--no-deps" in line


@pytest.mark.parametrize("name", [*SERVICES, "redis"])
def test_a_container_can_do_no_more_than_it_must(name: str) -> None:
    container = COMPOSE[name]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "network_mode"} & container.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_be_scaled(name: str) -> None:
    container = COMPOSE[name]
    assert "container_name" not in container
    assert name == "gateway" or "ports" not in container
    assert container["build"]["target"].partition("${")[0] == name
    assert container["scale"].endswith(":-1}")


def test_only_the_gateway_is_reachable_unless_a_profile_is_asked_for_and_only_from_this_machine() -> None:
    published = {name: container["ports"] for name, container in COMPOSE.items() if "ports" in container}
    assert [name for name in published if "profiles" not in COMPOSE[name]] == ["gateway"]
    assert all(port.startswith("${SLUICE_BIND:-127.0.0.1}:") for ports in published.values() for port in ports)
