"""`sluice up --gateways 2 --restart`: one address, two processes, of which either may end without a request failing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.servers.suite import Suite

DEADLINE_S = 90
BODY = {"model": "tekken", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with Suite("--gateways", "2", "--workers", "1", "--restart", "--speedup", "20") as running:
        yield running


def pids(suite: Suite, asked: int = 40) -> set[int]:
    """Of the gateways that answer, each on a new connection."""
    return {httpx.get(f"{suite.url}/ready", timeout=DEADLINE_S).json()["pid"] for _ in range(asked)}


def ask(suite: Suite) -> int:
    """The status of a chat on a new connection."""
    return httpx.post(f"{suite.url}/v1/chat/completions", json=BODY, timeout=DEADLINE_S).status_code


def until_two(suite: Suite, but: int) -> set[int]:
    deadline = time.monotonic() + DEADLINE_S
    while len(found := pids(suite)) < 2 or but in found:
        assert time.monotonic() < deadline, "".join(suite.output[-20:])
        time.sleep(0.2)
    return found


def test_both_gateways_answer_on_one_address(suite: Suite) -> None:
    assert len(suite.processes("gateway")) == 2
    assert pids(suite) == {process.pid for process in suite.processes("gateway")}
    assert {ask(suite) for _ in range(20)} == {200}


def test_a_gateway_that_ends_lets_its_requests_finish_and_is_started_again(suite: Suite) -> None:
    victim = suite.processes("gateway")[0]
    long = {**BODY, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=suite.url, timeout=DEADLINE_S) as client:
        streams = []
        try:
            for _ in range(12):
                stream = client.stream("POST", "/v1/chat/completions", json=long)
                streams.append((stream, stream.__enter__()))
            victim.send_signal(signal.SIGTERM)
            statuses = {ask(suite) for _ in range(10)}
            texts = ["".join(response.iter_text()) for _, response in streams]
        finally:
            for stream, _ in streams:
                stream.__exit__(None, None, None)
    assert statuses == {200}
    assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in texts)
    until_two(suite, victim.pid)
    assert any("restarting it" in line for line in suite.output)


def test_a_killed_worker_is_started_again_and_serves(suite: Suite) -> None:
    victim = suite.processes("worker")[0]
    victim.kill()
    deadline = time.monotonic() + DEADLINE_S
    while victim.is_running() or ask(suite) != 200:
        assert time.monotonic() < deadline, "".join(suite.output[-20:])
        time.sleep(0.2)
    assert [process.pid for process in suite.processes("worker")] != [victim.pid]
    assert suite.stop() == 0
