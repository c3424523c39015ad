"""A closed-loop client for OpenAI chat streams that costs next to nothing, so that it is not what is measured.

Requests are bytes made in advance; an answer is collected as it comes, with one timestamp a read, and looked at once,
when it is complete. Tokens are counted by the server's usage and checked against what was asked for.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

_TEXT = re.compile(rb'"(?:content|reasoning_content|text)": ?"[^"]')
_EVENT = b"data: {"
_CLOSE = "Connection: close\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_WORDS = re.findall(
    r"\w+",
    """
    river stone window morning paper garden music winter letter forest summer bridge market silver harbour candle
    mountain story kitchen island engine winding quiet yellow simple curious distant gentle narrow golden walking
    finding turning holding seeing making asking keeping reading between against under without before after around
    through because although however perhaps always never often water light house table world people question answer
    number system method reason change power field voice colour circle corner shadow valley village journey teacher
    student doctor farmer sailor painter writer the a of to and in is that it for was on are with as they be at one
    have this from or had by hot but some what there we can out other were all your when up use word how said each she
    """,
)


@dataclass(frozen=True)
class Load:
    """What to ask, and how much of it at a time. `words` is the length of each prompt, all prompts differ."""

    host: str
    port: int
    model: str
    streams: int
    requests: int
    tokens: int
    words: int
    warmup: int = 0
    seed: int = 0
    timeout_s: float = 120.0
    path: str = "/v1/chat/completions"
    fresh: bool = False  # a connection for each request


@dataclass
class Outcome:
    """What came of it; seconds throughout. `pauses` are between reads of one stream, after its first text."""

    started: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    events: int = 0
    answers: int = 0
    first_text: array[float] = field(default_factory=lambda: array("d"))
    per_token: array[float] = field(default_factory=lambda: array("d"))
    pauses: array[float] = field(default_factory=lambda: array("d"))
    errors: Counter[str] = field(default_factory=Counter)
    client_cpu: float = 0.0

    def merge(self, other: Outcome) -> None:
        """Adds what another process saw."""
        self.started = min(self.started, other.started) if self.started else other.started
        self.ended = max(self.ended, other.ended)
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.events += other.events
        self.answers += other.answers
        self.first_text += other.first_text
        self.per_token += other.per_token
        self.pauses += other.pauses
        self.errors += other.errors
        self.client_cpu += other.client_cpu


class BadAnswer(Exception):
    """An answer that is not what was asked for."""


class Wire(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._body = bytearray()
        self._body_at = -1
        self._length = -1
        self.status = 0
        self.first_text = 0.0
        self.last_read = 0.0
        self.pauses = array("d")
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("connection lost"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._body += data
        if self.first_text:
            self.pauses.append(now - self.last_read)
        elif _TEXT.search(self._body):
            self.first_text = now
        self.last_read = now
        if self._body_at < 0 and not self._read_head():
            return
        complete = (
            self._body.endswith(_LAST_CHUNK) if self._length < 0 else len(self._body) - self._body_at >= self._length
        )
        if complete and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _read_head(self) -> bool:
        end = self._body.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._body[:end]).lower()
        self._body_at = end + 4
        self.status = int(head[9:12])
        found = re.search(rb"content-length: *(\d+)", head)
        self._length = int(found.group(1)) if found else -1
        return True

    async def ask(self, request: bytes) -> bytearray:
        """Sends a request and waits for the whole answer; returns its body.

        Raises:
            ConnectionError: the server closed the connection.
        """
        if self._transport is None or not self.open:
            raise ConnectionError("connection lost")
        self._body, self._body_at, self._length = bytearray(), -1, -1
        self.first_text, self.pauses = 0.0, array("d")
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answered
        return self._body

    def close(self) -> None:
        """Closes the connection at once."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()


def build_requests(load: Load, count: int, salt: str) -> list[bytes]:
    """Complete HTTP requests, all with different prompts."""
    made = []
    for index in range(count):
        words = random.Random(f"{load.seed}-{salt}-{index}").choices(_WORDS, k=load.words)
        body = {
            "model": load.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": load.tokens,
            "ignore_eos": True,
            "min_tokens": load.tokens,
        }
        payload = json.dumps(body).encode()
        head = (
            f"POST {load.path} HTTP/1.1\r\nHost: {load.host}:{load.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n{_CLOSE if load.fresh else ''}\r\n"
        )
        made.append(head.encode() + payload)
    return made


def usage_of(body: bytes | bytearray) -> dict[str, Any]:
    """The usage object of a streamed answer, which is in its last event.

    Raises:
        BadAnswer: the stream ended without one.
    """
    start = body.rfind(_EVENT)
    line = bytes(body[start + 6 : body.find(b"\n", start)])
    try:
        event = json.loads(line)
    except ValueError as error:
        raise BadAnswer("the last event is no JSON") from error
    if "error" in event:
        raise BadAnswer(f"error event: {event['error'].get('message', '')[:120]}")
    if not isinstance(event.get("usage"), dict) or b"data: [DONE]" not in body:
        raise BadAnswer("the stream ended without usage")
    usage: dict[str, Any] = event["usage"]
    return usage


class Client:
    """`streams` connections, each of which asks again as soon as it has its answer."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._wires: list[Wire | None] = [None] * load.streams

    async def connect(self) -> None:
        """Opens every connection."""
        self._wires = list(await asyncio.gather(*(self._open() for _ in self._wires)))

    async def _open(self) -> Wire:
        loop = asyncio.get_running_loop()
        _, wire = await asyncio.wait_for(loop.create_connection(Wire, self._load.host, self._load.port), 10)
        return wire

    async def run(self, requests: Sequence[bytes]) -> Outcome:
        """Sends the requests; returns when all are answered or failed."""
        outcome = Outcome()
        queue = iter(requests)
        cpu = time.process_time()
        outcome.started = time.perf_counter()
        await asyncio.gather(*(self._stream(index, queue, outcome) for index in range(len(self._wires))))
        outcome.ended = time.perf_counter()
        outcome.client_cpu = time.process_time() - cpu
        return outcome

    def close(self) -> None:
        """Closes every connection."""
        for wire in self._wires:
            if wire is not None:
                wire.close()

    async def _stream(self, index: int, queue: Iterator[bytes], outcome: Outcome) -> None:
        for request in queue:
            try:
                wire, sent = self._wires[index], time.perf_counter()
                if wire is None or not wire.open:
                    wire = self._wires[index] = await self._open()
                async with asyncio.timeout(self._load.timeout_s):
                    body = await wire.ask(request)
                self._judge(wire, body, sent, outcome)
                if self._load.fresh:
                    wire.close()
            except (OSError, TimeoutError, BadAnswer) as error:
                outcome.errors[str(error) or type(error).__name__] += 1
                if (wire := self._wires[index]) is not None:
                    wire.close()
                self._wires[index] = None

    def _judge(self, wire: Wire, body: bytearray, sent: float, outcome: Outcome) -> None:
        if wire.status != 200:
            text = bytes(body.partition(b"\r\n\r\n")[2][:120]).decode(errors="replace")
            raise BadAnswer(f"HTTP {wire.status}: {text}")
        usage = usage_of(body)
        tokens = int(usage["completion_tokens"])
        if tokens != self._load.tokens:
            raise BadAnswer(f"{tokens} tokens instead of {self._load.tokens}")
        if not wire.first_text:
            raise BadAnswer("an answer without text")
        outcome.answers += 1
        outcome.tokens += tokens
        outcome.prompt_tokens += int(usage["prompt_tokens"])
        outcome.events += body.count(_EVENT)
        outcome.first_text.append(wire.first_text - sent)
        outcome.per_token.append((wire.last_read - wire.first_text) / max(tokens - 1, 1))
        outcome.pauses += wire.pauses
