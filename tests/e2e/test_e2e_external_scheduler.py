"""Schedulers of other people against `sluice up`: the six calls of examples/scheduler, and prompts tokenized once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from sluice_client import RouterClient, WorkerClient, by_answer, by_openai_body, unpack_u32

from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.suite import Suite

ROOT = Path(__file__).parents[2]
SCHEDULER, CLIENT = ROOT / "examples/scheduler/scheduler.py", ROOT / "clients/python/src"
QUESTION = "Which way does the river run? " * 8
BODY = {"model": "tekken", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
PRINTED = re.compile(r"prefill (\S+), decode (\S+): ([\d ]+)\n")


DIRECTED = {"x-sluice-worker": "worker-0", "x-sluice-prefill-worker": "prefill-0"}


@pytest.fixture(scope="module")
def pair() -> Iterator[Suite]:
    """A prefill and a decode worker, and a gateway that runs requests where their headers direct them."""
    flags = ("--workers", "1", "--prefill-workers", "1", "--routing", "direct", "--no-migration")
    with Suite("--speedup", "20", *flags) as running:
        yield running


def schedule(suite: Suite) -> tuple[str, str, list[int]]:
    """Runs the example; returns the prefill worker, the decode worker and the token ids that it prints."""
    command = [sys.executable, str(SCHEDULER), suite.address("router"), "tekken", QUESTION]
    env = {**os.environ, "PYTHONPATH": str(CLIENT)}  # in place of pip install ./clients/python
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert ended.returncode == 0, ended.stderr
    found = PRINTED.fullmatch(ended.stdout)
    assert found is not None, ended.stdout
    return found[1], found[2], list(map(int, found[3].split()))


def booked(suite: Suite) -> dict[str, tuple[int, float, float]]:
    """Requests, prefill and decode blocks booked, by worker."""
    with grpc.insecure_channel(suite.address("router")) as channel:
        loads = router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest(), timeout=20).loads
    return {load.worker_id: (load.requests, load.prefill_blocks, load.decode_blocks) for load in loads}


def until_nothing_is_booked(suite: Suite) -> None:
    deadline = time.monotonic() + 30
    while any(any(load) for load in booked(suite).values()):
        assert time.monotonic() < deadline, booked(suite)
        time.sleep(0.05)


def ask(suite: Suite, headers: dict[str, str] | None = None, **more: object) -> tuple[list[int], int]:
    """Asks the suite's own gateway; returns the answer's token ids and the prompt's length."""
    body = {**BODY, "return_token_ids": True, **more}
    answer = httpx.post(f"{suite.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens"]


def test_example_scheduler_with_whole_workers_answers_as_the_gateway(suite: Suite) -> None:
    prefill, decode, ids = schedule(suite)
    assert prefill == "-"
    assert decode in ("worker-0", "worker-1")
    assert ids == ask(suite)[0]
    until_nothing_is_booked(suite)


def test_example_scheduler_with_a_pair_answers_as_the_gateway(pair: Suite) -> None:
    prefill, decode, ids = schedule(pair)
    assert (prefill, decode) == ("prefill-0", "worker-0")
    assert ids == ask(pair, DIRECTED)[0]
    until_nothing_is_booked(pair)


async def test_reservation_of_an_openai_body_carries_the_ids_that_the_worker_takes(suite: Suite) -> None:
    expected, _ = ask(suite)
    async with RouterClient(suite.address("router")) as router:
        body = by_openai_body(json.dumps(BODY).encode())
        async with await router.select_and_reserve("once", "tekken", body, return_token_ids=True) as reservation:
            assert reservation.answer is not None
            output: list[int] = []
            async with WorkerClient(reservation.target.address) as worker:
                async for delta in worker.generate("once", "tekken", reservation.token_ids, max_tokens=16):
                    output += delta.token_ids
            prompt = by_answer(reservation.answer)
        assert output == expected
        again = await router.query("tekken", prompt)
        assert again.overlap is not None
        assert again.overlap.device_blocks == len(prompt.block_hashes) // 8 > 0, "the same blocks by hashes alone"
        assert not again.token_ids


async def test_direct_gateway_takes_the_ids_of_a_query_in_place_of_the_prompt(pair: Suite) -> None:
    async with RouterClient(pair.address("router")) as router:
        found = await router.query("tekken", by_openai_body(json.dumps(BODY).encode()), return_token_ids=True)
    ids = unpack_u32(found.token_ids).tolist()
    headers = {name: value for name, value in found.headers.items() if name.startswith("x-dynamo-")}
    assert set(headers) >= {"x-dynamo-worker-instance-id", "x-dynamo-prefill-instance-id"}
    other = [{"role": "user", "content": "An unrelated prompt."}]
    routed = ask(pair, headers, messages=other, nvext={"token_data": ids})
    assert routed == ask(pair, DIRECTED)
    assert routed[1] == len(ids)
