"""Reads the answers of a foreign HTTP server: every byte, event, value and second of them has a bound.

`HttpClient` reads everything through this module, so that a new call of it is bounded like the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, internal
from services.common.net.intake.json_intake import JsonIntake
from services.common.net.intake.pace import LARGE_BYTES

if TYPE_CHECKING:
    import httpx

MAX_RESPONSE_BYTES = 16 << 20
"""Bytes of a response of an engine's server; with more its request fails with INTERNAL, budget `answer_bytes`."""
MAX_ERROR_BYTES = 64 << 10
"""Bytes that are read of the body of an error of an engine's server; the rest is ignored."""
MAX_EVENT_BYTES = 32 << 20
"""Bytes of one event of an engine's server; with more its request fails with INTERNAL, budget `answer_bytes`."""
MAX_EVENT_PARTS = 65_536
"""Pieces of one event, each of which costs the time of hundreds of bytes; with more its request fails with INTERNAL."""
MAX_UNFINISHED_BYTES = 64 << 20
"""Bytes of the unfinished events of all streams of one server; beyond it a stream's request fails with INTERNAL."""
MAX_VALUES = 4_000_000
"""Values of an answer or event: a number counts 1, a list, object or string 10; refused, budget `answer_values`."""
TURN_S = 60.0
"""Longest wait of a large answer until it is parsed."""
MAX_MESSAGE = 500
"""Characters of an engine's own message in an error; the rest is left out."""
MAX_TRAILING_BYTES = 64 << 10
"""Bytes read after the last event, to use the connection again; with more it is closed."""
PARTS_PER_TURN = 64
"""Pieces of a body read before other tasks run: a piece may have one byte, and many arrive in one packet."""

_DONE = b"[DONE]"
_END_OF_EVENT = b"\n\n"
_BYTES = Budget("answer_bytes", MAX_RESPONSE_BYTES, "")
_INTAKE = JsonIntake(Budget("answer_values", MAX_VALUES, ""), subject="The response of the engine's server")


@contextmanager
def reading(subject: str) -> Iterator[None]:
    """Converts what wrong types and values in an answer raise into an INTERNAL error.

    Args:
        subject: what is read, such as ``description``.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise internal(f"The engine's server sent a malformed {subject}.") from error


def check_encoding(response: httpx.Response) -> None:
    """Raises SluiceError for a compressed body, which was not requested: a few KiB of it can expand to gigabytes."""
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise _refused("The engine's server sent a compressed response, which was not requested")


async def read_body(response: httpx.Response) -> bytes:
    """Returns the complete body of a response; raises SluiceError for one of more than MAX_RESPONSE_BYTES."""
    content = bytearray()
    async for part in _parts(response):
        content += part
        if len(content) > MAX_RESPONSE_BYTES:
            raise _refused(f"A response of the engine's server is larger than {MAX_RESPONSE_BYTES >> 20} MiB")
    return bytes(content)


async def read_error(response: httpx.Response) -> bytes:
    """Returns the first bytes of the body of an error."""
    content = bytearray()
    async for part in _parts(response):
        content += part
        if len(content) > MAX_ERROR_BYTES:
            break
    return bytes(content[:MAX_ERROR_BYTES])


async def _parts(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of a body as they arrive, and lets other tasks run between them."""
    count = 0
    async for part in response.aiter_bytes():  # not compressed, see check_encoding
        yield part
        count += 1
        if not count % PARTS_PER_TURN:
            await asyncio.sleep(0)


class EventStreams:
    """Reads the event streams of one server, whose unfinished events share one limit."""

    def __init__(self) -> None:
        self._unfinished_bytes = 0

    async def payloads(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        """Yields the data of each server-sent event up to the last, and reads the body to its end.

        The connection can then serve the next request.

        Raises:
            SluiceError: INTERNAL for an event of more than MAX_EVENT_BYTES, and while the unfinished events of all
                streams exceed MAX_UNFINISHED_BYTES.
        """
        rest, done, trailing_bytes, parts = bytearray(), False, 0, 0
        try:
            async for part in _parts(response):
                if done:
                    trailing_bytes += len(part)
                    if trailing_bytes > MAX_TRAILING_BYTES:
                        return  # the connection is closed
                    continue
                searched = max(len(rest) - 1, 0)  # an end may be split between two parts
                rest += part
                self._unfinished_bytes += len(part)
                start = 0
                while (end := rest.find(_END_OF_EVENT, max(start, searched))) >= 0:
                    data = _data_of(rest[start:end])
                    start = end + len(_END_OF_EVENT)
                    if data == _DONE:
                        done = True
                        break
                    if data is not None:
                        yield data
                del rest[:start]
                self._unfinished_bytes -= start
                parts = 0 if start else parts + 1
                self._check(len(rest), parts)
        finally:
            self._unfinished_bytes -= len(rest)

    def _check(self, event_bytes: int, parts: int) -> None:
        if event_bytes > MAX_EVENT_BYTES:
            raise _refused(f"An event of the engine's server is larger than {MAX_EVENT_BYTES >> 20} MiB")
        if parts > MAX_EVENT_PARTS:
            raise _refused(f"An event of the engine's server arrives in more than {MAX_EVENT_PARTS} pieces")
        if event_bytes and self._unfinished_bytes > MAX_UNFINISHED_BYTES:
            raise _refused(
                f"The unfinished events of the engine's server take more than {MAX_UNFINISHED_BYTES >> 20} MiB"
            )


def _refused(reason: str) -> SluiceError:
    """Counts an answer that is too large, and returns its error."""
    return _BYTES.refuse(reason, kind=ErrorKind.INTERNAL)


def _data_of(event: bytearray) -> bytes | None:
    """Returns the data of an event; None for a keep-alive comment."""
    return bytes(event[len(b"data:") :]).strip() if event.startswith(b"data:") else None


async def parse(content: bytes) -> Any:
    """Returns a JSON text's value; raises SluiceError when it is not JSON, too deep, or has too many values.

    A large one is parsed in slices, between which other tasks run.
    """
    try:
        if len(content) <= LARGE_BYTES:
            return _INTAKE.parse_now(content)
        return await _INTAKE.parse(content, TURN_S)
    except SluiceError as error:
        raise internal(error.message) from error


async def parse_object(content: bytes) -> dict[str, Any]:
    """Returns a JSON object; raises SluiceError for anything else."""
    value = await parse(content)
    if not isinstance(value, dict):
        raise internal("The engine's server sent a response that is not a JSON object.")
    return value


def message_of(content: bytes) -> str:
    """Returns the message of an error in the shapes of vLLM, SGLang and FastAPI; else the beginning of the text."""
    try:
        body = _INTAKE.parse_now(content)
    except SluiceError:
        return content[:MAX_MESSAGE].decode(errors="replace").strip()
    for name in ("error", "message", "detail"):
        found = body.get(name) if isinstance(body, dict) else None
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str):
            return found
        if found:
            return orjson.dumps(found)[:MAX_MESSAGE].decode(errors="replace")
    return ""
