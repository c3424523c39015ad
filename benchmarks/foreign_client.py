"""Asks one or more addresses of a system for chats for a time, and prints what became of them as JSON.

    python benchmarks/foreign_client.py --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --seconds 10

Every second answer is streamed, the others come in one piece. A request whose connection is refused or cut is sent once
more, to the next address; this is counted. It uses nothing of Sluice, so that it runs beside any system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

TOKENS = 100
ANSWER_WITHIN_S = 60.0


@dataclass
class Seen:
    """What became of the requests.

    Attributes:
        retried: needed a second address.
        lost, doubled: tokens that answers had too few and too many, by their usage.
        ended: of each request the monotonic time at which it began, its seconds, and whether it was answered.
    """

    requests: int = 0
    failed: int = 0
    retried: int = 0
    lost: int = 0
    doubled: int = 0
    longest_pause_s: float = 0.0
    why: Counter[str] = field(default_factory=Counter)
    ended: list[tuple[float, float, bool]] = field(default_factory=list)


class Cut(Exception):
    """A connection that ended before its answer."""


def body_of(model: str, number: int) -> dict[str, Any]:
    """Returns a chat of `TOKENS` tokens, streamed where the number is even."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me of number {number}."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    return body if number % 2 else {**body, "stream": True, "stream_options": {"include_usage": True}}


async def whole(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], seen: Seen) -> int:
    """Returns the completion tokens of an answer in one piece; raises as `streamed`."""
    began = time.monotonic()
    try:
        response = await client.post(f"{url}/v1/chat/completions", json=body)
    except httpx.TransportError as error:
        raise Cut(type(error).__name__) from error
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code} {response.content[:200]!r}")
    seen.longest_pause_s = max(seen.longest_pause_s, time.monotonic() - began)
    return int(response.json()["usage"]["completion_tokens"])


async def streamed(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], seen: Seen) -> int:
    """Returns the completion tokens of a streamed chat; raises Cut, or AssertionError for an error of the system."""
    tokens, done, last = 0, False, time.monotonic()
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code} {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                now = time.monotonic()
                seen.longest_pause_s, last = max(seen.longest_pause_s, now - last), now
                if line.startswith("event: error"):
                    raise AssertionError("an error event")
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: {"):
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise AssertionError(str(event["error"])[:200])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except httpx.TransportError as error:
        raise Cut(type(error).__name__) from error
    if not done:
        raise Cut("no end")
    return tokens


async def ask(client: httpx.AsyncClient, urls: list[str], model: str, number: int, seen: Seen) -> None:
    """Sends a request, and once more to the next address if its connection is cut."""
    seen.requests += 1
    body, began, answered = body_of(model, number), time.monotonic(), False
    once = streamed if body.get("stream") else whole
    for attempt in range(2):
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                tokens = await once(client, urls[(number // 2 + attempt) % len(urls)], body, seen)
            seen.lost += max(0, TOKENS - tokens)
            seen.doubled += max(0, tokens - TOKENS)
            answered = True
            break
        except Cut as error:
            seen.why[f"cut: {error}"] += 1
            if attempt or len(urls) < 2:
                break
            seen.retried += 1
        except (AssertionError, TimeoutError) as error:
            seen.why[str(error) or "hung"] += 1
            break
    seen.failed += not answered
    seen.ended.append((began, time.monotonic() - began, answered))


async def run(urls: list[str], model: str, streams: int, seconds: float) -> Seen:
    """Keeps so many requests running for a time."""
    seen, until_s = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)

    async def repeat(index: int) -> None:
        number = index
        while time.monotonic() < until_s:
            await ask(client, urls, model, number, seen)
            number += streams + 1  # in turns streamed and in one piece

    async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S, limits=limits) as client:
        await asyncio.gather(*map(repeat, range(streams)))
    return seen


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True, help="of a frontend; may be repeated")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    seen = asyncio.run(run(options.url, options.model, options.streams, options.seconds))
    json.dump({**vars(seen), "why": dict(seen.why.most_common(5))}, sys.stdout)


if __name__ == "__main__":
    main()
