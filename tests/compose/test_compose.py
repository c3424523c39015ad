"""The suite in containers: starts, serves, scales, spreads the load, and is gone afterwards.

What the containers said ends up in build/compose-test.log.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
SCALE = {"preprocess": 2, "router": 2, "postprocess": 2, "worker": 4}
LOGS = ROOT / "build/compose-test.log"
CHATS = 200
CONCURRENCY = 16

# What each replica counts once for a request it did its share of.
REQUESTS = {
    "preprocess": "sluice_preprocess_prompt_tokens_count",
    "router": "sluice_router_queries_total",
    "postprocess": "sluice_postprocess_finished_streams_total",
    "worker": "sluice_worker_requests_total",
}

pytestmark = pytest.mark.compose


class Suite:
    """A Compose project of its own, so that it meets no other one on this machine."""

    def __init__(self, project: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = ["docker", "compose", "-p", project, "-f", str(ROOT / "deploy/compose/compose.yaml")]
        # The mock engine is fast here, so that the load finds the services' limits and not the model's pace.
        self._environment = {**os.environ, "SLUICE_PORT": str(port), "SLUICE_WORKER_SPEEDUP": "20"}

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Output of a `docker compose` command; fails the test with what it said when it fails."""
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, (
            f"docker compose {' '.join(arguments)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    def up(self, scale: dict[str, int]) -> None:
        """Starts or scales and waits until all containers are healthy."""
        flags = [f"--scale={service}={count}" for service, count in scale.items()]
        self.compose("up", "--detach", "--wait", "--wait-timeout", "180", *flags, timeout_s=240)

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers."""
        return self.compose("ps", "--quiet", service).split()

    def requests_served(self) -> dict[str, dict[str, int]]:
        """service → container → requests so far, as each replica counts them."""
        return {
            service: {container: _count(container, counter) for container in self.containers(service)}
            for service, counter in REQUESTS.items()
        }


def _count(container: str, counter: str) -> int:
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics', timeout=5).read().decode())"
    text = subprocess.run(
        ["docker", "exec", container, "python", "-c", fetch], check=True, capture_output=True, text=True, timeout=30
    ).stdout
    samples = [line for line in text.splitlines() if line.startswith((f"{counter} ", f"{counter}{{"))]
    return int(sum(float(line.rpartition(" ")[2]) for line in samples))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    suite = Suite(f"sluice-test-{secrets.token_hex(4)}", _free_port())
    try:
        suite.compose("build", timeout_s=1200)
        suite.up({})
        yield suite
    finally:
        try:
            LOGS.parent.mkdir(exist_ok=True)
            LOGS.write_text(suite.compose("logs", "--no-color"))
        finally:
            suite.compose("down", "--volumes", "--remove-orphans", "--timeout", "20", timeout_s=180)


async def _chat(client: httpx.AsyncClient, model: str, number: int) -> None:
    """Runs one streamed chat and asserts that the stream is whole."""
    # Different from the first word on, so that no two prompts share a cached prefix beyond the template.
    prompt = f"{number} {secrets.token_hex(8)} please tell me about the number {number}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 32,
        "stream": True,
    }
    text, finish, done = "", None, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
    assert done
    assert finish in ("stop", "length")
    assert text


async def _load(url: str, chats: int) -> None:
    """Runs `chats` chats, `CONCURRENCY` at a time; the first that fails fails the test."""
    gate = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as group:
        models = await client.get("/v1/models")
        assert models.status_code == 200, models.text
        model = models.json()["data"][0]["id"]

        async def one(number: int) -> None:
            async with gate:
                await _chat(client, model, number)

        for number in range(chats):
            group.create_task(one(number))


async def test_one_of_each_serves(suite: Suite) -> None:
    await _load(suite.url, CONCURRENCY)


async def test_load_spreads_over_all_replicas(suite: Suite) -> None:
    suite.up(SCALE)
    deadline = time.monotonic() + 60
    while True:  # the gateway learns about new replicas within seconds
        before = suite.requests_served()
        await _load(suite.url, 2 * CONCURRENCY)
        seen = suite.requests_served()
        if all(seen[name][container] > before[name][container] for name in seen for container in seen[name]):
            break
        assert time.monotonic() < deadline, f"some replicas never got a request: {seen}"

    before = suite.requests_served()
    await _load(suite.url, CHATS)
    after = suite.requests_served()

    shares = {
        name: [after[name][container] - before[name][container] for container in after[name]] for name in REQUESTS
    }
    assert {name: len(counts) for name, counts in shares.items()} == SCALE
    for name, counts in shares.items():
        assert sum(counts) >= CHATS, f"{name} counted {counts}"
        assert min(counts) >= CHATS / SCALE[name] / 4, f"{name} counted {counts}: the load did not spread"


async def test_scaling_down_under_load_fails_no_request(suite: Suite) -> None:
    suite.up(SCALE)
    load = asyncio.create_task(_load(suite.url, CHATS))
    await asyncio.sleep(0.5)  # some chats are under way
    await asyncio.to_thread(suite.up, dict.fromkeys(SCALE, 1))
    await load
    assert [len(suite.containers(name)) for name in SCALE] == [1, 1, 1, 1]


async def test_a_restart_of_router_and_redis_heals_by_itself(suite: Suite) -> None:
    suite.compose("restart", "--timeout", "20", "redis", "router")
    suite.up({})
    await _load(suite.url, CONCURRENCY)


def test_containers_run_unprivileged_on_a_read_only_root(suite: Suite) -> None:
    for service in ("gateway", *SCALE):
        for container in suite.containers(service):
            done = subprocess.run(
                ["docker", "exec", container, "sh", "-c", "id -u; touch /app/x || touch /usr/local/x"],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.stdout == "10001\n"
            assert done.returncode != 0
