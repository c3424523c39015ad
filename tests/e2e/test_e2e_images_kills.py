"""Chats with two images whose worker is killed at every tenth token: the answers are as undisturbed."""

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
from tests.support.clients.image_parts import Color, described, image_url, user_message
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.servers.loose_suite import LooseSuite
from tests.support.waiting import until

WAIT_S = 120
STREAMS = 6
IMAGES = 2
TOKENS = 64
SENT = "sluice_gateway_media_files_total"
KINDS: tuple[dict[str, Any], ...] = ({}, {"logprobs": True, "top_logprobs": 2}, {"temperature": 0.7, "top_p": 0.9})


def colors(token: int, number: int) -> tuple[Color, Color]:
    """Returns the colors of the pictures of a stream, which no other stream has."""
    return (token, number, 10), (token, number, 200)


def body(token: int, number: int) -> dict[str, Any]:
    words = {"type": "text", "text": "Compare the two."}
    first, second = map(image_url, colors(token, number))
    options = {"max_tokens": TOKENS, "ignore_eos": True, "seed": number, **KINDS[number % len(KINDS)]}
    return {"model": "tiny", "messages": [user_message(first, words, second)], **options}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseSuite]:
    flags = ("--engine-args", "timing=fixed,fixed_step_ms=20")
    with LooseSuite(build_qwen2_vl(tmp_path_factory.mktemp("kills")), postprocess=1, worker_flags=flags) as running:
        yield running


async def files_sent(client: httpx.AsyncClient) -> int:
    """Returns the number of media files that the gateway has sent to workers."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(SENT))


async def killed_at(suite: LooseSuite, client: httpx.AsyncClient, victim: str, token: int) -> list[Answer]:
    """Returns the answers; a worker is killed once each stream has that many events, when none has ended."""
    events: Counter[int] = Counter()

    def count(number: int) -> None:
        events[number] += 1

    running = [
        asyncio.create_task(streamed(client, body(token, number), partial(count, number))) for number in range(STREAMS)
    ]
    await until(lambda: sum(each >= token for each in events.values()) >= STREAMS, WAIT_S)
    suite.end(victim, signal.SIGKILL)
    return await asyncio.gather(*running)


@pytest.mark.parametrize("tokens", [(1, 20), pytest.param((10, 30, 40), marks=pytest.mark.slow)])
async def test_worker_killed_at_every_tenth_token_of_chats_with_images_changes_no_answer(
    suite: LooseSuite, tokens: tuple[int, ...]
) -> None:
    moved = 0
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        for round_number, token in enumerate(tokens):
            victim = f"worker-{round_number % 2}"
            before = await files_sent(client)
            answers = await killed_at(suite, client, victim, token)
            sent = await files_sent(client) - before
            moves = sum(answer.choice.get("migrations", 0) for answer in answers)
            assert sent == IMAGES * (STREAMS + moves), f"{moves} streams moved from {victim} at token {token}"
            moved += moves
            for number, answer in enumerate(answers):
                assert answer.text.startswith(described(*colors(token, number)))
                undisturbed = await whole(client, body(token, number))
                assert answer.same == undisturbed.same, f"stream {number}, {victim} killed at token {token}"
            suite.start(victim)
            await asyncio.to_thread(suite.wait_ready, 2)
    assert moved >= STREAMS, "too few streams moved"
