"""Streams chats from one or more addresses of a system for a time, and prints what became of them as JSON.

    python benchmarks/foreign_client.py --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --seconds 10

A request whose connection is refused or cut is sent once more, to the next address; this is counted. It uses nothing of
Sluice, so that it runs beside any system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

TOKENS = 100
ANSWER_WITHIN_S = 60.0


@dataclass
class Seen:
    """What became of the requests; `retried` of them needed a second address."""

    requests: int = 0
    failed: int = 0
    retried: int = 0
    other_length: int = 0
    longest_pause_s: float = 0.0
    longest_s: float = 0.0
    why: Counter[str] = field(default_factory=Counter)


class Cut(Exception):
    """A connection that ended before its answer."""


async def stream(client: httpx.AsyncClient, url: str, model: str, number: int, seen: Seen) -> int:
    """Returns the completion tokens of a streamed chat; raises Cut, or AssertionError for an error of the system."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me of number {number}."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
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
    started = time.monotonic()
    for attempt in range(2):
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                tokens = await stream(client, urls[(number + attempt) % len(urls)], model, number, seen)
            seen.other_length += tokens != TOKENS
            break
        except Cut as error:
            seen.why[f"cut: {error}"] += 1
            if attempt or len(urls) < 2:
                seen.failed += 1
                break
            seen.retried += 1
        except (AssertionError, TimeoutError) as error:
            seen.why[str(error) or "hung"] += 1
            seen.failed += 1
            break
    seen.longest_s = max(seen.longest_s, time.monotonic() - started)


async def run(urls: list[str], model: str, streams: int, seconds: float) -> Seen:
    """Keeps so many streams running for a time."""
    seen, until_s = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)

    async def repeat(index: int) -> None:
        number = index
        while time.monotonic() < until_s:
            await ask(client, urls, model, number, seen)
            number += streams

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
