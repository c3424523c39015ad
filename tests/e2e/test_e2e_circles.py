"""What a request made is gone when it is over, without a garbage collector that comes late and takes its time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.image_parts import data_url, image_url, input_image, picture, user_message
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.uncollected_gateway import TOLD_IN
from tests.support.waiting import wait_until

REQUESTS, LATE_REQUESTS = 8, 3
FEW = 20
"""Objects; a circle of a request has some 3 to 250 of them. What is not about requests may leave one now and then."""
SAYS = [{"role": "user", "content": "Tell me of rivers."}]
CALLS = [
    {
        "role": "user",
        "content": '<<<script: Well.<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>>>>',
    }
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CHAT, TEXT, TURN, ANSWER = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TOLD = (CHAT, TEXT, TURN, ANSWER)
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": (CHAT, {"messages": SAYS, "max_tokens": 8}, 200),
    "chat, two choices": (CHAT, {"messages": SAYS, "max_tokens": 8, "n": 2}, 200),
    "chat with logprobs": (CHAT, {"messages": SAYS, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}, 200),
    "chat that calls": (CHAT, {"messages": CALLS, "tools": TOOLS, "max_tokens": 80}, 200),
    "completion": (TEXT, {"prompt": "Once", "max_tokens": 8}, 200),
    "completion with logprobs": (
        TEXT,
        {"prompt": ["Once", "Twice"], "max_tokens": 8, "logprobs": 2, "echo": True},
        200,
    ),
    "turn": (TURN, {"messages": SAYS, "max_tokens": 8}, 200),
    "turn that calls": (
        TURN,
        {"messages": CALLS, "max_tokens": 80, "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
        200,
    ),
    "response": (ANSWER, {"input": "Tell me of rivers.", "max_output_tokens": 8, "store": False}, 200),
    "turn that is late": (TURN, {"messages": SAYS, "max_tokens": 2000, "ignore_eos": True}, 504),
    "response that is late": (
        ANSWER,
        {"input": "Tell me.", "max_output_tokens": 2000, "ignore_eos": True, "store": False},
        504,
    ),
    "turn that is too long": (TURN, {"messages": [{"role": "user", "content": "word " * 4000}], "max_tokens": 8}, 400),
    "chat with images": (
        CHAT,
        {"messages": [user_message(image_url((255, 0, 0)), image_url((0, 0, 255)))], "max_tokens": 8},
        200,
    ),
    "chat with a broken image": (
        CHAT,
        {"messages": [user_message({"type": "image_url", "image_url": data_url(picture((1, 2, 3))[:60])})]},
        400,
    ),
    "chat with an image that is not fetched": (
        CHAT,
        {"messages": [user_message({"type": "image_url", "image_url": "https://media.test/a.png"})]},
        400,
    ),
    "response with an image": (
        ANSWER,
        {"input": [user_message(input_image((255, 0, 0)))], "max_output_tokens": 8, "store": False},
        200,
    ),
    "embeddings": ("/v1/embeddings", {"input": ["One.", "Two."]}, 200),
    "embeddings of what is too long": ("/v1/embeddings", {"input": ["One.", "word " * 9000]}, 400),
    "a template that is none": (CHAT, {"messages": SAYS, "chat_template": "{% for x in %}"}, 400),
    "no such field": (CHAT, {"messages": SAYS, "temperature": "warm"}, 400),
    "no such model": (CHAT, {"messages": SAYS, "model": "other"}, 404),
    "too long": (TEXT, {"prompt": "word " * 4000, "max_tokens": 8}, 400),
    "time is up": (CHAT, {"messages": SAYS, "max_tokens": 2000, "ignore_eos": True}, 504),
}
TIME = {"x-request-timeout-ms": "600"}
HEADERS = {"time is up": TIME, "turn that is late": TIME, "response that is late": TIME}


CASES = [
    (kind, stream) for kind, (path, _, _) in KINDS.items() for stream in (True, False) if path in TOLD or not stream
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("told") / "circles.json"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, told: Path) -> Iterator[LooseSuite]:
    model = build_qwen2_vl(tmp_path_factory.mktemp("circles") / "tiny")
    os.environ[TOLD_IN] = str(told)
    try:
        with LooseSuite(
            model,
            workers=1,
            postprocess=1,
            worker_flags=("--engine-args", "timing=fixed,fixed_step_ms=2"),
            gateway="tests.support.servers.uncollected_gateway",
        ) as running:
            yield running
    finally:
        del os.environ[TOLD_IN]


def circles(suite: LooseSuite, told: Path) -> dict[str, int]:
    """What the gateway holds only because of circles; it forgets it."""
    told.unlink(missing_ok=True)
    suite.end("gateway", signal.SIGUSR1)
    wait_until(lambda: told.exists(), 20)
    found: dict[str, int] = json.loads(told.read_text())
    return found


async def ask(suite: LooseSuite, kind: str, stream: bool) -> None:
    path, body, status = KINDS[kind]
    number = LATE_REQUESTS if kind in HEADERS else REQUESTS
    async with httpx.AsyncClient(base_url=suite.url, timeout=60) as client:
        for _ in range(number):
            answer = await client.post(
                path, json={"model": "tiny", **body, **({"stream": True} if stream else {})}, headers=HEADERS.get(kind)
            )
            assert answer.status_code == status or (stream and status == 504 and b"error" in answer.content), (
                answer.text
            )


@pytest.mark.parametrize(("kind", "stream"), CASES)
async def test_requests_leave_no_circles(suite: LooseSuite, told: Path, kind: str, stream: bool) -> None:
    await ask(suite, kind, stream)
    circles(suite, told)  # of the first requests of a kind: adapters, caches
    await ask(suite, kind, stream)
    await asyncio.sleep(0.1)  # connections end
    assert sum(circles(suite, told).values()) < FEW


async def test_clients_that_leave_leave_no_circles(suite: LooseSuite, told: Path) -> None:
    for _ in range(2):
        circles(suite, told)
        async with httpx.AsyncClient(base_url=suite.url, timeout=60) as client:
            for _ in range(REQUESTS):
                body = {"model": "tiny", "messages": SAYS, "max_tokens": 2000, "ignore_eos": True, "stream": True}
                async with client.stream("POST", CHAT, json=body) as answer:
                    async for _piece in answer.aiter_raw():
                        break
        await asyncio.sleep(0.5)
    assert sum(circles(suite, told).values()) < FEW
