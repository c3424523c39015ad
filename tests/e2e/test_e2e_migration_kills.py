"""A worker is killed again and again, each time at another token: five hundred answers, all as undisturbed."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.clients.chat_answers import Answer, streamed, whole
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite
from tests.support.waiting import until

pytestmark = pytest.mark.slow

WAIT_S = 180
STREAMS = 42
KILLS = range(1, 37, 3)
CALLS = (
    "<think>It wants the weather in München 🌦.</think>Let me look."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "München", "days": [1, 2, 3]}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
KINDS: tuple[dict[str, Any], ...] = (
    {"tools": TOOLS},
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 60, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"max_tokens": 60, "logprobs": True, "top_logprobs": 3, "ignore_eos": True},
    {"max_tokens": 80, "stop": ["ou", " an"], "min_tokens": 10},
    {"max_tokens": 60, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
)


def body(number: int) -> dict[str, Any]:
    more = KINDS[number % len(KINDS)]
    said = f"Number {number}: <<<script: {CALLS}>>>" if "tools" in more else f"Tell me of number {number}."
    return {"model": "tiny", "messages": [{"role": "user", "content": said}], "seed": number, **more}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseSuite]:
    flags = ("--engine-args", "timing=fixed,fixed_step_ms=25")
    with LooseSuite(build_tiny_model(tmp_path_factory.mktemp("kills") / "tiny"), worker_flags=flags) as running:
        yield running


async def killed_at(suite: LooseSuite, client: httpx.AsyncClient, victim: str, token: int) -> list[Answer]:
    """The answers, while a worker is killed as soon as half of the streams have said so much."""
    said: Counter[int] = Counter()

    def heard(number: int) -> None:
        said[number] += 1

    asked = [asyncio.create_task(streamed(client, body(number), partial(heard, number))) for number in range(STREAMS)]
    await until(lambda: sum(count >= token for count in said.values()) >= STREAMS // 2, WAIT_S)
    suite.end(victim, signal.SIGKILL)
    return await asyncio.gather(*asked)


async def test_a_worker_killed_at_every_third_token(suite: LooseSuite) -> None:
    limits = httpx.Limits(max_connections=None)
    cases, moved = 0, 0
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S, limits=limits) as client:
        told = await asyncio.gather(*(whole(client, body(number)) for number in range(STREAMS)))
        for round_number, token in enumerate(KILLS):
            victim = f"worker-{round_number % 2}"
            for number, answer in enumerate(await killed_at(suite, client, victim, token)):
                assert answer.same == told[number].same, f"number {number}, {victim} killed at token {token}"
                cases += 1
                moved += answer.choice.get("migrations", 0)
            suite.start(victim)
            await asyncio.to_thread(suite.wait_ready, 2)
    assert cases >= 500
    assert moved >= cases // 5, "too few were disturbed"
