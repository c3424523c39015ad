"""Random hostile inputs at every entrance beside honest streams: answers are equal, refusals typed, no process ends.

The short run is part of every test run. The long one lasts `SLUICE_TEST_HOSTILE_MINUTES` (30): each round has a seed of
its own, which a failure names, and `SLUICE_TEST_HOSTILE_SEED` begins with that one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from services.common.net.ports import free_port
from tests.support.clients.entrances import SENDERS, Delivery, Target, channels
from tests.support.clients.honest_clients import HonestClients
from tests.support.servers.suite import Suite

MODEL = "tekken"
STREAMS = 50
ROUNDS, EXAMPLES = 1, 3
MAX_BYTES = 12 << 20
MINUTES = float(os.environ.get("SLUICE_TEST_HOSTILE_MINUTES", "30"))
FIRST_SEED = int(os.environ.get("SLUICE_TEST_HOSTILE_SEED", "1"))
UNTYPED = {"500", "502", "504", "INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"}
"""Statuses that no input may cause."""

T = TypeVar("T")

FIELDS = (
    "model", "messages", "prompt", "input", "tools", "tool_choice", "response_format", "stop", "bad_words",
    "logit_bias", "stop_token_ids", "allowed_token_ids", "max_tokens", "min_tokens", "n", "stream", "temperature",
    "logprobs", "prompt_logprobs", "cache_salt", "nvext", "metadata", "priority", "chat_template",
    "chat_template_kwargs", "guided_regex", "structured_outputs", "add_generation_prompt", "documents", "type",
    "store", "background", "custom_id", "url", "body",
)  # fmt: skip
OUTPUTS = (
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "\\ud801"}}]',
    '[TOOL_CALLS]f{"a": "\\udc00\\ud801"}',
    "\x00\ufffd😀" * 20,
    "<think>\ud7ff</think>" * 5,
)
"""What the mock engine generates when the prompt says so."""
SCRIPTS = st.sampled_from([f"<<<script64: {b64encode(text.encode()).decode()}>>>" for text in OUTPUTS])
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2**31, 2**32, 2**63, 2**70, 0.5, -1e300, 5e-324])
    | st.text(max_size=20)
    | SCRIPTS
    | st.sampled_from(["user", "system", "a" * 3_000, "\x00", "\u2028", "é" * 50, MODEL])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
"""Nothing here repeats a value, whose nested copies would take all memory: what is large is bytes (`REPEATED`)."""


def _chat(content: Any, fields: dict[str, Any]) -> bytes:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 40, "tools": tools}
    return _dumped({**body, **fields})


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer over 64 bits
        return repr(value).encode("utf-8", "replace")


def _damaged(text: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    damaged = bytearray(text)
    for at, piece in edits:
        damaged[at % (len(damaged) + 1) :][: len(piece)] = b""
        damaged[at % (len(damaged) + 1) : at % (len(damaged) + 1)] = piece
    return bytes(damaged)


CHATS = st.builds(_chat, VALUES | SCRIPTS, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
LINES = st.lists(
    st.builds(
        lambda name, body: (
            b'{"custom_id":%s,"method":"POST","url":"/v1/chat/completions","body":%s}' % (_dumped(name), body)
        ),
        SCALARS,
        CHATS,
    ),
    max_size=5,
).map(b"\n".join)
REPEATED = st.builds(
    lambda piece, times: b'{"model":"tekken","messages":[' + b",".join([piece] * times) + b"]}",
    st.sampled_from([b"0", b"[]", b"{}", b'""', b"[[[[]]]]", b'{"role":"user","content":"a"}']),
    st.integers(0, 200_000),
)
NESTED = st.integers(0, 50_000).map(lambda depth: b'{"messages":' + b"[" * depth + b"]" * depth + b"}")
EDITS = st.lists(st.tuples(st.integers(0, 100_000), st.binary(max_size=6)), max_size=3)
PAYLOADS = (
    st.builds(_damaged, CHATS | LINES, EDITS) | CHATS | LINES | REPEATED | NESTED | st.binary(max_size=2_000)
).map(lambda payload: payload[:MAX_BYTES])
DELIVERIES = st.builds(
    Delivery,
    chunk=st.sampled_from([0, 0, 0, 1, 7, 100, 5_000]),
    pause_s=st.sampled_from([0.0, 0.0, 0.0, 0.0001]),
    ends=st.sampled_from([True, True, True, True, True, False]),
)


@dataclass(frozen=True)
class Input:
    """What is sent through one entrance."""

    entrance: str
    payload: bytes
    delivery: Delivery

    def __repr__(self) -> str:
        return f"Input({self.entrance!r}, {self.payload[:300]!r} of {len(self.payload)} bytes, {self.delivery})"


INPUTS = st.tuples(*(st.builds(Input, st.just(name), PAYLOADS, DELIVERIES) for name in sorted(SENDERS)))
"""One input through each entrance."""


class Arena:
    """Honest clients and hostile inputs on an event loop in a thread.

    Attributes:
        statuses: of the hostile inputs, by entrance and status.
    """

    def __init__(self, url: str, target: Target) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.honest = HonestClients(url, STREAMS, tokens=100)
        self.statuses = Counter[tuple[str, str]]()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Runs a job on the loop."""
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(300)

    async def attack(self, inputs: tuple[Input, ...]) -> None:
        """Sends all inputs at once, and fails if one has an untyped answer or an honest answer is another one."""
        sending = (SENDERS[one.entrance](self._target, one.payload, _bounded(one)) for one in inputs)
        for one, status in zip(inputs, await asyncio.gather(*sending), strict=True):
            self.statuses[one.entrance, status] += 1
            assert status not in UNTYPED, (status, one)
        self.honest.check()

    async def close(self) -> None:
        """Ends the honest clients."""
        await self.honest.__aexit__(None, None, None)
        await channels.close()

    def stop(self) -> None:
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def _bounded(one: Input) -> Delivery:
    """Returns a delivery that ends within seconds: short chunks of a long payload take minutes."""
    chunk = max(one.delivery.chunk, len(one.payload) // 2_000) if one.delivery.chunk else 0
    return replace(one.delivery, chunk=chunk)


@pytest.fixture
def attacked() -> Iterator[tuple[Suite, Target]]:
    """A suite with all entrances open."""
    twin, picker = free_port(), free_port()
    environment = {
        "SLUICE_ROUTER_HTTP_LISTEN": f"127.0.0.1:{twin}",
        "SLUICE_ROUTER_PICKER_LISTEN": f"127.0.0.1:{picker}",
    }
    with Suite("--speedup", "50", env=environment) as suite:
        host, _, port = suite.url.removeprefix("http://").partition(":")
        yield (
            suite,
            Target((host, int(port)), ("127.0.0.1", twin), f"127.0.0.1:{picker}", suite.address("router"), MODEL),
        )


def _round(arena: Arena, suite: Suite, number: int) -> None:
    @seed(number)
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(INPUTS)
    def send(inputs: tuple[Input, ...]) -> None:
        arena.run(arena.attack(inputs))

    try:
        send()
    except BaseException as error:
        error.add_note(f"SLUICE_TEST_HOSTILE_SEED={number} repeats it; the suite's output ends with:")
        error.add_note("".join(suite.output[-100:]))
        raise


@pytest.mark.parametrize("minutes", [0.0, pytest.param(MINUTES, marks=pytest.mark.slow)])
def test_honest_streams_beside_random_inputs_at_every_entrance_are_undisturbed(
    attacked: tuple[Suite, Target], minutes: float
) -> None:
    suite, target = attacked
    processes = suite.processes()
    arena = Arena(suite.url, target)
    ends_at, number = time.monotonic() + 60 * minutes, FIRST_SEED
    arena.run(arena.honest.__aenter__())
    try:
        while number < FIRST_SEED + ROUNDS or time.monotonic() < ends_at:
            _round(arena, suite, number)
            number += 1
    finally:
        print(f"{number - FIRST_SEED} rounds, {arena.honest.answers} honest answers, {dict(arena.statuses)}")
        arena.run(arena.close())
        arena.stop()
    arena.honest.check()
    assert arena.honest.answers >= STREAMS
    assert {name for name, _ in arena.statuses} == set(SENDERS)
    assert all(process.is_running() for process in processes)
    unhandled = [at for at, line in enumerate(suite.output) if "Traceback" in line]
    assert not unhandled, "".join(suite.output[unhandled[0] - 1 : unhandled[0] + 60])
