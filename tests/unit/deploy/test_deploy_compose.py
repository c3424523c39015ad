"""deploy/compose as files: settings are real, images are pinned, profiles fit together, Grafana finds its sources."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from redis import Redis

from services.common.net.ports import free_port
from services.common.settings.service import SECRETS_DIR, ServiceSettings
from services.gateway.settings import GatewaySettings
from services.postprocess.settings import PostprocessSettings
from services.preprocess.settings import PreprocessSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from sluice.cli import tokens as made_tokens
from tests.support.oracles.promql import run_promtool
from tests.support.repository import ROOT

COMPOSE = ROOT / "deploy/compose"
OBSERVABILITY = ROOT / "deploy/observability"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "preprocess": PreprocessSettings,
    "router": RouterSettings,
    "postprocess": PostprocessSettings,
    "worker": WorkerSettings,
    "worker-transformers": WorkerSettings,
    "worker-vllm": WorkerSettings,
    "worker-sglang": WorkerSettings,
}
ONCE = {"redis-password", "tokens"}
"""Containers that make something at the first start, and end."""
PROFILES = {"balancer", "envoy", "redis-ha", "observability", "gpu", "gpu-sglang", "transformers"}
COMPLETED = "service_completed_successfully"
PROCESSING = {"vllm": "vllm", "sglang": "sglang", "native-framework": ""}
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-+])([^}]*))?\}")


def suite() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return found


def tokens() -> dict[str, Any]:
    """What tokens.yaml puts on top."""
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "tokens.yaml").read_text())
    return found


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Source of each volume, by where it is mounted."""
    return {parts[1]: parts[0] for volume in service.get("volumes", ()) if len(parts := volume.split(":")) > 1}


def defaulted(text: str, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """A value as Compose interpolates it, with every variable that is not given at its default."""

    def value(match: re.Match[str]) -> str:
        given = variables.get(match[1], "")
        if match[2] in (":+", "+"):
            return match[3] if given else ""
        return given or match[3] or ""

    return VARIABLE.sub(value, text)


def env_file(name: str) -> dict[str, str]:
    lines = (COMPOSE / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_of_a_service_is_a_setting_and_its_value_is_accepted(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"SLUICE_{service.partition('-')[0].upper()}_"
    settings = SETTINGS[service]
    given = suite()["services"][service]["environment"]
    for name, value in given.items():
        if name == "HF_TOKEN":
            continue
        assert name.startswith(prefix)
        assert name.removeprefix(prefix).lower() in settings.model_fields
        if value is not None:
            monkeypatch.setenv(name, defaulted(str(value)))
    assert settings.load([]).drain_s < 20, "the containers are killed after 20 s"


def test_the_gateway_is_as_open_as_the_address_that_publishes_its_port() -> None:
    gateway = suite()["services"]["gateway"]
    published = gateway["environment"]["SLUICE_GATEWAY_PUBLISHED_HOST"]
    assert defaulted(published) == "127.0.0.1"
    assert all(port.startswith(published) for port in gateway["ports"]), "one variable decides both"


def test_profiles_have_a_file_each_that_switches_them_on_and_sets_variables_that_are_used() -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    used = {profile for service in suite()["services"].values() for profile in service.get("profiles", ())}
    assert used == PROFILES == {file.stem for file in COMPOSE.glob("*.env")}
    for profile in PROFILES:
        variables = env_file(profile)
        # What other files have switched on stays on.
        assert variables.pop("COMPOSE_PROFILES") == "${COMPOSE_PROFILES:+${COMPOSE_PROFILES-},}" + profile
        assert variables
        assert all(f"${{{name}" in text for name in variables), variables


@pytest.mark.parametrize("file", PROCESSING)
@pytest.mark.parametrize("service", ["preprocess", "postprocess"])
def test_processing_file_sets_the_flag_and_the_image_of_both_services(
    service: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {path.stem for path in (COMPOSE / "processing").glob("*.env")} == PROCESSING.keys()
    variables = env_file(f"processing/{file}")
    engine = PROCESSING[file]
    assert variables.get("SLUICE_PROCESSING_ENGINE", "") == engine
    container = suite()["services"][service]
    assert defaulted(container["image"], variables) == f"sluice-{service}{f'-{engine}' if engine else ''}:local"
    assert defaulted(container["build"]["target"], variables) == f"{service}{'-engine' if engine else ''}"
    assert defaulted(container["build"]["args"]["ENGINE"], variables) == (engine or "vllm")
    for name, value in container["environment"].items():
        given = variables.get(name) if value is None else defaulted(value, variables)
        if given:
            monkeypatch.setenv(name, given)
    loaded = (PreprocessSettings if service == "preprocess" else PostprocessSettings).load([])
    flags = {
        name
        for name in ("vllm_processing", "sglang_processing", "native_framework_processing", "trtllm_processing")
        if getattr(loaded, name)
    }
    assert flags == {f"{file.replace('-', '_')}_processing"}


def test_the_failover_profile_sends_routers_to_the_sentinels(monkeypatch: pytest.MonkeyPatch) -> None:
    url = env_file("redis-ha")["SLUICE_ROUTER_REDIS_URL"]
    assert urlsplit(url).scheme == "redis+sentinel"
    services = suite()["services"]
    assert urlsplit(url).hostname in services
    monitored = re.search(r"^sentinel monitor (\S+) ", (COMPOSE / "redis/sentinel.sh").read_text(), re.MULTILINE)
    assert monitored is not None
    assert urlsplit(url).path.split("/")[1] == monitored[1]
    assert services["sentinel"]["scale"] >= 3
    assert services["router"]["depends_on"]["sentinel"] == {"condition": "service_healthy", "required": False}


def test_redis_is_reached_by_routers_only_and_asks_for_a_password() -> None:
    services = suite()["services"]
    assert suite()["networks"]["store"] == {"internal": True}
    joined = {name for name, service in services.items() if "store" in service.get("networks", ())}
    servers = {"redis", "redis-replica", "sentinel"}
    assert joined == {"router", *servers}
    assert all(services[name]["networks"] == ["store"] for name in servers)
    holders = {name for name, service in services.items() if "redis-password" in mounted(service).values()}
    assert holders == {"router", "redis-password", *servers}
    assert mounted(services["router"])[str(SECRETS_DIR)] == "redis-password"
    assert all(services[name]["depends_on"]["redis-password"]["condition"] == COMPLETED for name in servers)
    assert not any("ports" in services[name] for name in servers)
    assert {"redis_password", "redis_sentinel_password"} <= RouterSettings.model_fields.keys()


def test_tokens_of_a_service_are_in_a_volume_that_it_alone_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokens()
    maker = made["services"].pop("tokens")
    assert set(made["services"]) == set(SETTINGS)
    for name, service in made["services"].items():
        kind = name.partition("-")[0]
        assert mounted(service) == {"/run/tokens": f"tokens-{kind}"}
        assert service["volumes"][0].endswith(":ro")
        assert service["depends_on"] == {"tokens": {"condition": COMPLETED}}
        settings = {
            key.removeprefix(f"SLUICE_{kind.upper()}_").lower(): value for key, value in service["environment"].items()
        }
        files = {"peer_token_file": f"/run/tokens/{made_tokens.SHOWN}"}
        if kind != "gateway":
            files["tokens_file"] = f"/run/tokens/{made_tokens.ACCEPTED}"
        assert settings == files
        assert files.keys() <= SETTINGS[name].model_fields.keys()
    callers = {name for name in made_tokens.CALLS if name != made_tokens.SCHEDULER}
    assert {source: target for target, source in mounted(maker).items()} == {
        f"tokens-{name}": f"/tokens/{name}" for name in callers
    }
    assert set(made["volumes"]) == {f"tokens-{name}" for name in callers}


def test_containers_have_no_rights_they_do_not_need() -> None:
    for name, service in {**suite()["services"], "tokens": tokens()["services"]["tokens"]}.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name in ONCE:  # root, which owns new volumes, but without a network
            assert service["network_mode"] == "none", name
            assert service["restart"] == "no", name
        else:
            assert name in SETTINGS or not service["user"].startswith("0"), name
        for port in service.get("ports", ()):
            assert defaulted(port).startswith("127.0.0.1:"), name


def test_images_are_ours_or_public_ones_with_a_version() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE))
    for name, service in suite()["services"].items():
        image = defaulted(service["image"])
        if "build" in service:
            target = defaulted(service["build"]["target"])
            assert target in targets
            engine = defaulted(service["build"].get("args", {}).get("ENGINE", ""))
            assert not engine or f"engine-{engine}" in targets
            assert image == f"sluice-{f'worker-{engine}' if target == 'worker-gpu' else target}:local"
        else:
            assert re.fullmatch(r"[a-z/]+:v?\d[\d.]*", image), name
            assert re.match(r"\$\{SLUICE_[A-Z]+_IMAGE:-", service["image"]), name


def test_prometheus_scrapes_every_service_and_loads_the_rules() -> None:
    config = yaml.safe_load((COMPOSE / "observability/prometheus.yaml").read_text())
    names = {name for job in config["scrape_configs"] for one in job["dns_sd_configs"] for name in one["names"]}
    assert names == SETTINGS.keys()
    mounts = suite()["services"]["prometheus"]["volumes"]
    assert "../observability/rules:/etc/prometheus/rules:ro" in mounts
    assert config["rule_files"] == ["/etc/prometheus/rules/sluice.yaml"]
    assert (OBSERVABILITY / "rules/sluice.yaml").exists()
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    wanted = re.findall(r'job=~"([^"]*)"', (OBSERVABILITY / "rules/sluice.yaml").read_text())
    assert wanted
    assert all(re.fullmatch(pattern, job) for pattern in wanted for job in jobs)


def test_promtool_accepts_the_configuration() -> None:
    done = run_promtool("check", "config", "--syntax-only", str(COMPOSE / "observability/prometheus.yaml"))
    assert done.returncode == 0, done.stderr


def test_grafanas_provisioning_points_at_what_is_there() -> None:
    services = suite()["services"]
    folder = COMPOSE / "observability/grafana"
    sources = yaml.safe_load((folder / "datasources/sluice.yaml").read_text())
    assert sources["apiVersion"] == 1
    ports = {"prometheus": 9090, "traces": 16686}
    for source in sources["datasources"]:
        url = urlsplit(source["url"])
        assert url.hostname in services
        assert url.port == ports[url.hostname]
    assert [source["type"] for source in sources["datasources"] if source.get("isDefault")] == ["prometheus"]

    (provider,) = yaml.safe_load((folder / "dashboards/sluice.yaml").read_text())["providers"]
    mounts = dict(mount.removesuffix(":ro").split(":") for mount in services["grafana"]["volumes"])
    assert mounts["./observability/grafana"] == "/etc/grafana/provisioning"
    assert mounts["../observability/dashboards"] == provider["options"]["path"]


def test_every_dashboard_takes_the_source_that_is_provisioned() -> None:
    found = [json.loads(file.read_text()) for file in (OBSERVABILITY / "dashboards").glob("*.json")]
    assert found
    for dashboard in found:
        # A variable of the type of the default source chooses that one.
        chosen = [one for one in dashboard["templating"]["list"] if one["type"] == "datasource"]
        assert [(one["name"], one["query"]) for one in chosen] == [("datasource", "prometheus")]
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                assert target["datasource"]["uid"] == "${datasource}"


SCRIPTS = ROOT / "deploy/compose/redis"
NAMES = ("sluice_router_redis_password", "sluice_router_redis_sentinel_password")


class Container:
    """A folder that stands for the file system of a container; its scripts see no other."""

    def __init__(self, folder: Path, secrets: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._secrets = secrets
        commands = folder / "bin"
        commands.mkdir(parents=True)
        (folder / "data").mkdir()
        (folder / "tmp").mkdir()
        for name, said in (("getent", "127.0.0.1 redis"), ("hostname", "127.0.0.1")):
            (commands / name).write_text(f"#!/bin/sh\necho {said}\n")
            (commands / name).chmod(0o755)

    def script(self, name: str, **replaced: str) -> Path:
        """A script with the paths and ports of this folder."""
        places = {name: str(self.folder / name.strip("/")) for name in ("/data", "/tmp")}
        places |= {"/run/secrets": str(self._secrets), **replaced}
        text = (SCRIPTS / name).read_text()
        assert all(old in text for old in replaced)
        text = re.sub("|".join(map(re.escape, places)), lambda match: places[match[0]], text)
        made = self.folder / name
        made.write_text(text)
        return made

    @contextmanager
    def running(self, script: Path) -> Iterator[subprocess.Popen[str]]:
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        process = subprocess.Popen(["sh", str(script)], env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "Ready to accept connections" in line or "Sentinel ID is" in line:
                    break
            else:
                pytest.fail(f"{script.name} has ended")
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=20)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The volume with the password."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    subprocess.run(["sh", str(SCRIPTS / "password.sh"), str(folder)], check=True)
    return folder


def test_password_is_made_once_and_under_the_names_of_the_routers_settings(secrets: Path) -> None:
    made = {path.name: path.read_text() for path in secrets.iterdir()}
    assert set(made) == set(NAMES)
    (password,) = set(made.values())
    assert len(password) == 64
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in secrets.iterdir())
    subprocess.run(["sh", str(SCRIPTS / "password.sh"), str(secrets)], check=True)
    assert {path.name: path.read_text() for path in secrets.iterdir()} == made


@pytest.mark.parametrize("name", ["node.sh", "sentinel.sh"])
def test_server_asks_for_the_password(tmp_path: Path, secrets: Path, name: str) -> None:
    if shutil.which("redis-server") is None:
        pytest.fail("redis-server is not on PATH; scripts/redis.sh installs it.", pytrace=False)
    container = Container(tmp_path / "container", secrets)
    if name == "node.sh":
        changes = {'save ""': f'save ""\nport {container.port}'}
    else:
        changes = {"port 26379": f"port {container.port}", "-p 26379": f"-p {container.port}"}
    script = container.script(name, **changes, **{"-h sentinel": "-h 127.0.0.1"})
    password = (secrets / NAMES[0]).read_text()
    with container.running(script) as process:
        with socket.create_connection(("127.0.0.1", container.port), 20) as stranger:
            stranger.sendall(b"PING\r\n")
            assert stranger.recv(99).startswith(b"-NOAUTH")
        with Redis(port=container.port, password=password) as ours:
            assert ours.ping()
            if name == "node.sh":
                assert ours.config_get("masterauth") == {"masterauth": password}
                assert ours.config_get("appendonly") == {"appendonly": "yes"}
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert password.encode() not in command
        check = container.script("cli.sh")
        asked = ["sh", str(check), "-p", str(container.port), "ping"]
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "PONG\n"
