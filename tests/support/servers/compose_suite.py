"""The suite in containers, as a Compose project of the test's own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from services.common.net.ports import free_port
from tests.support.repository import ROOT

COMPOSE = ROOT / "deploy/compose"
STANDINS = ROOT / "tests/compose/standins"
TAG = "compose-test"
SERVICES = ("gateway", "preprocess", "router", "postprocess", "worker")

# What each replica counts at least once for a request it did its share of.
REQUESTS = {
    "gateway": "sluice_gateway_generations_total",
    "preprocess": "sluice_preprocess_prompt_tokens_count",
    "router": "sluice_router_queries_total",
    "postprocess": "sluice_postprocess_finished_streams_total",
    "worker": "sluice_worker_requests_total",
}

FRONTS = {"balancer": "SLUICE_BALANCER_PORT", "envoy": "SLUICE_ENVOY_PORT"}
"""Profiles that bring what stands before the gateways, and the variable of its port."""


class Suite:
    """A Compose project that meets no other one on this machine.

    Args:
        profiles: names of the files `deploy/compose/NAME.env` to start with.
        variables: on top of those files.
        hidden: services that are not started, because there is no image for them here.
    """

    def __init__(
        self, profiles: Sequence[str] = (), variables: Mapping[str, str] | None = None, hidden: Sequence[str] = ()
    ) -> None:
        self.project = f"sluice-test-{secrets.token_hex(4)}"
        self.port = free_port()
        port = next((name for profile, name in FRONTS.items() if profile in profiles), "SLUICE_PORT")
        # The mock engine is fast here, so that the load finds the services' limits and not the model's pace.
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "COMPOSE_"))},
            "SLUICE_WORKER_SPEEDUP": "20",
            "SLUICE_TAG": TAG,
            port: str(self.port),
            **(variables or {}),
        }
        self._flags = ["-p", self.project]
        for profile in profiles:
            self._flags += ["--env-file", str(COMPOSE / f"{profile}.env")]
        self._hidden = dict.fromkeys(hidden, 0)

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str, timeout_s: float = 180) -> str:
        """Output of a `docker compose` command; fails the test with what it said when it fails."""
        return self._run(
            "docker", "compose", *self._flags, "-f", str(COMPOSE / "compose.yaml"), *arguments, s=timeout_s
        )

    def up(self, scale: Mapping[str, int] | None = None) -> None:
        """Starts or scales and waits until all containers are healthy."""
        flags = [f"--scale={service}={count}" for service, count in {**(scale or {}), **self._hidden}.items()]
        try:
            self.compose("up", "--detach", "--wait", "--wait-timeout", "240", *flags, timeout_s=300)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._ailing()}") from None

    def _ailing(self) -> str:
        """What the health checks of containers that are not healthy said last."""
        said = []
        for container in self.compose("ps", "--all", "--quiet").split():
            state = json.loads(self._run("docker", "inspect", "--format", "{{json .State}}", container, s=60))
            if state.get("Health", {}).get("Status", "healthy") != "healthy":
                name = self._run("docker", "inspect", "--format", "{{.Name}}", container, s=60).strip()
                said += [name, *(f"  {one['ExitCode']} {one['Output']}" for one in state["Health"]["Log"])]
        return "\n".join(said)

    def roll(self, *services: str) -> None:
        """Replaces the containers of services as users are told to."""
        self._run(str(COMPOSE / "roll.sh"), *self._flags, "--", *services, s=300)

    def down(self, log: Path) -> None:
        """Removes everything; what the containers said is in `log`."""
        try:
            log.parent.mkdir(exist_ok=True)
            log.write_text(self.compose("logs", "--no-color"))
        finally:
            self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers."""
        return self.compose("ps", "--quiet", service).split()

    def execute(self, container: str, *command: str) -> str:
        """Output of a command in a container."""
        return self._run("docker", "exec", container, *command, s=60)

    def address(self, service: str, port: int) -> str:
        """Where a published port of the service is, as a URL."""
        return f"http://{self.compose('port', service, str(port)).strip()}"

    def requests_served(self) -> dict[str, dict[str, int]]:
        """service → container → requests so far, as each replica counts them."""
        return {
            service: {container: self._count(container, counter) for container in self.containers(service)}
            for service, counter in REQUESTS.items()
        }

    def _count(self, container: str, counter: str) -> int:
        fetch = (
            "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics', timeout=9).read().decode())"
        )
        text = self.execute(container, "python", "-c", fetch)
        samples = [line for line in text.splitlines() if line.startswith((f"{counter} ", f"{counter}{{"))]
        return int(sum(float(line.rpartition(" ")[2]) for line in samples))

    def _run(self, *command: str, s: float) -> str:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=s)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout


def get_json(url: str) -> Any:
    """What a URL answers."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@cache
def build() -> None:
    """Builds the images of all services, once."""
    environment = {**os.environ, "SLUICE_TAG": TAG}
    command = ["docker", "compose", "-f", str(COMPOSE / "compose.yaml"), "build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]


@cache
def image(service: str) -> tuple[str, str]:
    """The image of a service that is not ours: its name, and "public" or "stand-in".

    The public one if this machine has it or can pull it, else one made of Debian's package; empty where there is none.
    """
    configured = subprocess.run(
        ["docker", "compose", "--profile", "*", "-f", str(COMPOSE / "compose.yaml"), "config", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    public = str(json.loads(configured)["services"][service]["image"])
    return available(public, {"balancer": "haproxy"}.get(service, service))


@cache
def available(public: str, target: str) -> tuple[str, str]:
    """A public image if this machine has it or can pull it, else the stand-in of that target; as `image`."""
    for command in (["image", "inspect"], ["pull", "--quiet"]):
        if subprocess.run(["docker", *command, public], capture_output=True, timeout=600).returncode == 0:
            return public, "public"
    if f" AS {target}\n" not in (STANDINS / "Dockerfile").read_text():
        return "", "none"
    return standin(target), "stand-in"


def standin(target: str, *arguments: str) -> str:
    """Builds a target of the stand-ins' Dockerfile; returns the image's name."""
    name = f"sluice-standin-{target}"
    command = ["docker", "build", "--quiet", "--target", target, "--tag", name, *arguments]
    command += ["--build-arg", f"SLUICE_IMAGE=sluice-router:{TAG}", str(STANDINS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return name
