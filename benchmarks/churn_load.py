"""The load of `churn.py`: long streams and short requests that know what each answer has to be."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.clients.chat_answers import Answer, streamed, whole

MODEL, GUEST = "tiny", "guest"
"""The model that always has a worker, and the one whose only worker comes and goes."""
PROMPTS = 40
DEADLINE_S = 60.0
"""Seconds in which a request ends, whatever happens; one that does not is hung."""
REFUSED_WITHIN_S = 5.0
LOST_WITHIN_S = 12.0
"""The same for one whose generation had begun: it waits 10 s for a worker to take it over, by the gateway's default."""
_LOST = "take the generation over"
"""Seconds in which a request for a model without a worker is refused."""
_LONG, _SHORT = (60, 240), (4, 16)
_NO_WORKERS = frozenset(("no_workers", "model_not_found"))


@dataclass
class Seen:
    """What became of the requests."""

    answered: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    longest_pause_s: float = 0.0

    def add_problem(self, kind: str, text: str) -> None:
        """Records a request that did not end as it has to."""
        self.answered[kind] += 1
        self.problems.append(f"{time.strftime('%H:%M:%S')} {kind}: {text[:300]}")


def body_of(number: int, model: str = MODEL) -> dict[str, Any]:
    """Returns the request of a number; half of the numbers are long streams."""
    draw = random.Random(number)
    tokens = draw.randint(*(_LONG if number % 2 else _SHORT))
    messages = [{"role": "user", "content": f"Number {number}: tell me of {draw.choice('abcdefgh')} {number * 7919}."}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "seed": number}


class ChurnLoad:
    """Streams without a pause, and short requests at a rate, whose answers are compared with those before.

    Args:
        url: of the gateway.
        guest_serves: whether requests for `GUEST` must be answered now; None: either is right, as it comes or goes.
    """

    def __init__(self, url: str, streams: int, rate: float, guest_serves: Callable[[], bool | None]) -> None:
        self._url = url
        self._streams = streams
        self._rate = rate
        self._guest_serves = guest_serves
        self._expected: dict[int, tuple[object, ...]] = {}
        self._draw = random.Random(0)
        self.seen = Seen()

    async def learn(self) -> None:
        """Asks for every answer once, undisturbed."""
        async with self._client() as client:
            numbers = range(2 * PROMPTS)
            answers = await asyncio.gather(*(whole(client, body_of(number)) for number in numbers))
        self._expected = {number: answer.same for number, answer in zip(numbers, answers, strict=True)}

    async def run(self, stop: asyncio.Event) -> None:
        """Loads the suite until told to stop; requests in progress end first."""
        async with self._client() as client:
            streams = [asyncio.create_task(self._stream_on(client, index, stop)) for index in range(self._streams)]
            short: set[asyncio.Task[None]] = set()
            while not stop.is_set():
                task = asyncio.create_task(self._short(client))
                short.add(task)
                task.add_done_callback(short.discard)
                await asyncio.sleep(self._draw.expovariate(self._rate))
            await asyncio.gather(*streams, *short)

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self._url, timeout=2 * DEADLINE_S, limits=limits)

    async def _stream_on(self, client: httpx.AsyncClient, index: int, stop: asyncio.Event) -> None:
        draw = random.Random(index)
        while not stop.is_set():
            number = 2 * draw.randrange(PROMPTS) + 1
            last = time.monotonic()

            def on_event() -> None:
                nonlocal last
                now = time.monotonic()
                self.seen.longest_pause_s = max(self.seen.longest_pause_s, now - last)
                last = now

            await self._check("stream", number, streamed(client, body_of(number), on_event))

    async def _short(self, client: httpx.AsyncClient) -> None:
        if self._draw.random() < 0.1:
            await self._guest(client)
            return
        number = 2 * self._draw.randrange(PROMPTS)
        await self._check("short", number, whole(client, body_of(number)))

    async def _check(self, kind: str, number: int, asked: Coroutine[Any, Any, Answer]) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await asked
        except TimeoutError:
            self.seen.add_problem(f"{kind} hung", f"request {number} did not end in {DEADLINE_S:g} s")
        except (AssertionError, httpx.HTTPError) as error:
            self.seen.add_problem(f"{kind} failed", f"request {number}: {type(error).__name__} {error}")
        else:
            if answer.same != self._expected[number]:
                self.seen.add_problem(f"{kind} differs", f"request {number}: {answer.same}")
            else:
                self.seen.answered[kind] += 1
        self.seen.longest_s = max(self.seen.longest_s, time.monotonic() - started)

    async def _guest(self, client: httpx.AsyncClient) -> None:
        """Asks the model that comes and goes: it answers, or the refusal names the reason, within seconds."""
        before, started = self._guest_serves(), time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                response = await client.post("/v1/chat/completions", json=body_of(2, GUEST))
        except (TimeoutError, httpx.HTTPError) as error:
            self.seen.add_problem("guest hung", f"{type(error).__name__} {error}")
            return
        took_s = time.monotonic() - started
        if response.status_code == 200:
            self.seen.answered["guest"] += 1
        elif before and self._guest_serves():  # throughout
            self.seen.add_problem("guest latched", f"{response.status_code} {response.text}")
        elif _code_of(response) not in _NO_WORKERS or took_s > _refused_within_s(response):
            self.seen.add_problem("guest failed", f"{response.status_code} after {took_s:.1f} s {response.text}")
        else:
            self.seen.answered["guest refused"] += 1


def _refused_within_s(response: httpx.Response) -> float:
    return LOST_WITHIN_S if _LOST in response.text else REFUSED_WITHIN_S


def _code_of(response: httpx.Response) -> str:
    try:
        document: Mapping[str, Any] = response.json()
    except ValueError:
        return ""
    return str((document.get("error") or {}).get("code") or "")
