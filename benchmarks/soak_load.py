"""Further loads of `soak.py`: clients that read slowly or leave, batches, and images."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
from churn_load import DEADLINE_S, MODEL, Seen, body_of
from rude import leaver, slow

from tests.support.clients.chat_answers import streamed
from tests.support.clients.image_parts import image_url, user_message

LEAVERS, SLOW = 4, 2
SLOW_FOR_S = 20.0
BATCH_LINES = 20
BATCH_WITHIN_S = 120.0
EVERY_S = 5.0
IMAGES, IMAGE_EVERY_S = 12, 1.0
IMAGE_TOKENS = 40
_ENDED = frozenset(("completed", "failed", "cancelled", "expired"))


async def run_rude(url: str, stop: asyncio.Event) -> None:
    """Keeps clients that leave in the middle of a stream, and clients that read a few hundred bytes a second."""
    await asyncio.gather(
        *(_leave_again(url, index, stop) for index in range(LEAVERS)), *(_read_slowly(url, stop) for _ in range(SLOW))
    )


async def _leave_again(url: str, index: int, stop: asyncio.Event) -> None:
    draw, address = random.Random(index), urlsplit(url)
    while not stop.is_set():
        await leaver(str(address.hostname), address.port or 80, _request(2 * index + 1), draw.uniform(0.1, 3))


async def _read_slowly(url: str, stop: asyncio.Event) -> None:
    address = urlsplit(url)
    while not stop.is_set():
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(SLOW_FOR_S, over.set)
        try:
            await slow(str(address.hostname), address.port or 80, _request(1), over)
        except OSError:
            await asyncio.sleep(1)


def _request(number: int) -> bytes:
    content = json.dumps({**body_of(number), "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


async def run_batches(url: str, seen: Seen, stop: asyncio.Event) -> None:
    """Runs one batch after the other, and deletes its files."""
    async with httpx.AsyncClient(base_url=url, timeout=BATCH_WITHIN_S) as client:
        while not stop.is_set():
            try:
                await _run_batch(client, seen)
            except (httpx.HTTPError, KeyError) as error:
                seen.add_problem("batch failed", f"{type(error).__name__} {error}")
            await asyncio.sleep(EVERY_S)


async def _run_batch(client: httpx.AsyncClient, seen: Seen) -> None:
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": body_of(2 * number, MODEL)}
        for number in range(BATCH_LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    fields = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=fields)).json()
    deadline = time.monotonic() + BATCH_WITHIN_S
    while batch["status"] not in _ENDED and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    counts = batch["request_counts"]
    if batch["status"] != "completed" or counts["completed"] != BATCH_LINES:
        seen.add_problem("batch failed", f"{batch['status']}: {counts}")
    else:
        seen.answered["batch"] += 1
    for name in (batch.get("output_file_id"), batch.get("error_file_id"), batch["input_file_id"]):
        if name:
            await client.delete(f"/v1/files/{name}")


async def run_images(url: str, seen: Seen, stop: asyncio.Event) -> None:
    """Asks about one image after the other; each answer has to be the first one about that image."""
    first: dict[int, tuple[object, ...]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=2 * DEADLINE_S) as client:
        number = 0
        while not stop.is_set():
            number = (number + 1) % IMAGES
            try:
                async with asyncio.timeout(DEADLINE_S):
                    answer = await streamed(client, _about_image(number), lambda: None)
            except (AssertionError, TimeoutError, httpx.HTTPError) as error:
                seen.add_problem("image failed", f"image {number}: {type(error).__name__} {error}")
                continue
            if answer.same != first.setdefault(number, answer.same):
                seen.add_problem("image differs", f"image {number}: {answer.same}")
            else:
                seen.answered["image"] += 1
            await asyncio.sleep(IMAGE_EVERY_S)


def _about_image(number: int) -> dict[str, Any]:
    message = user_message(image_url((20 * number, 90, 200)), {"type": "text", "text": f"Describe image {number}."})
    return {"model": MODEL, "messages": [message], "max_tokens": IMAGE_TOKENS, "ignore_eos": True, "seed": number}
