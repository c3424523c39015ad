"""Further loads of `soak.py`: clients that read slowly or leave, and batches."""

from __future__ import annotations

import asyncio
import json
import random
import time
from urllib.parse import urlsplit

import httpx
from churn_load import MODEL, Seen, body_of
from rude import leaver, slow

LEAVERS, SLOW = 4, 2
SLOW_FOR_S = 20.0
BATCH_LINES = 20
BATCH_WITHIN_S = 120.0
EVERY_S = 5.0
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
