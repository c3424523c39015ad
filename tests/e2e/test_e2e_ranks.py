"""One worker with two data-parallel ranks: the router chooses the rank, and the engine runs the prompt there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx

from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.suite import Suite

WAIT_S = 30


def verse(topic: str) -> str:
    return " ".join(f"Line {number} about {topic} goes on." for number in range(60))


def ask(url: str, prompt: str, **fields: object) -> dict[str, object]:
    body = {"model": "tekken", "prompt": prompt, "max_tokens": 4, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def cached(url: str, prompt: str) -> int:
    usage = ask(url, prompt)["usage"]
    assert isinstance(usage, dict)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def long_answer(url: str, prompt: str) -> Iterator[None]:
    """Keeps the rank that holds the prompt busy, for seconds, with fewer blocks than it holds of the prompt."""
    body = {"model": "tekken", "prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: the answer is closed with it
        assert next(lines)
        yield


def chosen(url: str, prompt: str) -> int:
    """The rank that would run it."""
    placements = ask(url, prompt, nvext={"annotations": ["query_instance_id:"]})["placements"]
    assert isinstance(placements, list)
    return int(placements[0]["decode_dp_rank"])


def blocks(address: str) -> dict[int, int]:
    """Blocks in the router's index by rank."""
    counts = {0: 0, 1: 0}
    with grpc.insecure_channel(address) as channel:
        for dump in router_pb2_grpc.RouterStub(channel).DumpIndex(router_pb2.DumpIndexRequest(), timeout=20):
            counts[dump.data_parallel_rank] += len(dump.block_hashes) // 8
    return counts


def test_a_prompt_goes_to_the_rank_that_holds_it() -> None:
    env = {"SLUICE_WORKER_ENGINE_ARGS": "data_parallel_size=2"}
    with Suite("--speedup", "0.2", "--workers", "1", env=env) as suite:
        router = suite.address("router")
        for held, topic in enumerate(("rivers", "mountains"), 1):
            assert cached(suite.url, verse(topic)) == 0
            deadline = time.monotonic() + WAIT_S
            while sum(count > 10 for count in blocks(router).values()) < held:
                assert time.monotonic() < deadline, blocks(router)
                time.sleep(0.05)
        homes = {topic: chosen(suite.url, verse(topic)) for topic in ("rivers", "mountains")}
        assert set(homes.values()) == {0, 1}
        for topic, rank in homes.items():
            with long_answer(suite.url, verse(topic)):  # an engine that chose for itself would take the other one
                for _ in range(2):
                    assert chosen(suite.url, verse(topic)) == rank
                    assert cached(suite.url, verse(topic)) > 100
