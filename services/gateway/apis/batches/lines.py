"""Lines of a batch's input file, read in blocks and checked one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import orjson

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.intake.json_intake import JsonIntake
from services.common.net.intake.pace import BodyPace
from services.gateway.http.middleware.scopes import BodyNeeds

MAX_CUSTOM_ID = 512
"""Characters of a `custom_id`; a line with a longer one counts as broken."""
BLOCK_BYTES = 8 << 10
"""Bytes that are split into lines in a turn of the event loop."""
READ_BYTES = 256 << 10
PACE_TIMEOUT_S = 60.0
LINES_A_TURN = 128
"""Lines that are checked in a turn of the event loop."""
COUNTED_BYTES = 1 << 20
"""Bytes whose lines are counted in a turn of the event loop."""

Read = Callable[[int, int], Awaitable[bytes | None]]
"""Returns a range of the file by start and size; None once it was deleted."""
Parse = Callable[[bytes], Awaitable[Any]]
"""Returns the value of a JSON text; raises SluiceError for one that is none, or exceeds a budget of bodies."""


def line_parser(values: Budget, pace: BodyPace) -> Parse:
    """Returns a parser of lines within the budgets of bodies; large lines have turns with large bodies."""
    intake = JsonIntake(values, pace, subject="The line")

    async def parse(text: bytes) -> Any:
        return await intake.parse(text, PACE_TIMEOUT_S)

    return parse


class FileLost(Exception):
    """The input file was deleted."""


class BatchLine(NamedTuple):
    """A request of a batch.

    Attributes:
        body: JSON of an object without `priority`.
        priority: what the client set; None: nothing.
        needs: what a key needs for the body.
    """

    custom_id: str
    body: bytes
    model: str
    priority: Any
    needs: BodyNeeds


class LineError(NamedTuple):
    """Why a line is not a request."""

    custom_id: str | None
    code: str
    message: str

    def as_result(self, number: int) -> bytes:
        """Returns the line's line of the error file."""
        shown = {"id": f"batch_req_{number}", "custom_id": self.custom_id, "response": None}
        return orjson.dumps({**shown, "error": self.as_error(number)})

    def as_error(self, number: int) -> dict[str, Any]:
        """Returns the error without its line."""
        return {"code": self.code, "message": f"Line {number + 1}: {self.message}", "line": number + 1}


class RawLine(NamedTuple):
    """A line that is not empty; `text` is empty if it has more than the most bytes."""

    number: int
    text: bytes
    size: int


async def count_lines(data: bytes) -> int:
    """Returns the number of lines of a file, including empty ones, with turns of the event loop."""
    number = 0
    for start in range(0, len(data), COUNTED_BYTES):
        number += data.count(b"\n", start, start + COUNTED_BYTES)
        await asyncio.sleep(0)
    return number + (not data.endswith(b"\n") and bool(data))


async def raw_lines(read: Read, max_bytes: int) -> AsyncIterator[RawLine]:
    """Yields the lines of a file that are not empty; holds one line at a time, and takes bounded turns.

    Args:
        max_bytes: of a line; what exceeds them is not held.

    Raises:
        FileLost: the file was deleted.
    """
    number, start = 0, _Start(max_bytes)
    async for block in _blocks(read):
        *ended, rest = block.split(b"\n") if block else (b"", b"")  # at the end of the file, its last line ends
        if ended:
            ended[0], size = start.end(ended[0])
            for at, text in enumerate(ended):
                size = len(text) if at else size
                if size > max_bytes or (text and not text.isspace()):
                    yield RawLine(number, text if size <= max_bytes else b"", size)
                    number += 1
                    if number % LINES_A_TURN == 0:
                        await asyncio.sleep(0)
        start.add(rest)
        await asyncio.sleep(0)


class _Start:
    """The start of a line whose end has not been read, without what exceeds the most bytes of a line."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._max_bytes:
            self._parts.append(part)
        else:
            self._parts.clear()

    def end(self, part: bytes) -> tuple[bytes, int]:
        """Returns the line, empty if it is too long, and its size."""
        self.add(part)
        text, size = b"".join(self._parts), self._size
        self._parts.clear()
        self._size = 0
        return text, size


async def _blocks(read: Read) -> AsyncIterator[bytes]:
    """Yields the file in blocks, and at last an empty one."""
    start = 0
    while True:
        data = await read(start, READ_BYTES)
        if data is None:
            raise FileLost
        for offset in range(0, len(data), BLOCK_BYTES):
            yield data[offset : offset + BLOCK_BYTES]
        if len(data) < READ_BYTES:
            break
        start += len(data)
    yield b""


async def read_line(line: RawLine, endpoint: str, max_bytes: int, parse: Parse) -> BatchLine | LineError:
    """Returns the request of a line.

    Args:
        endpoint: path of all requests.
        max_bytes: of a line.

    Raises:
        SluiceError: UNAVAILABLE if the turn of a large line does not come in time.
    """
    if line.size > max_bytes:
        return LineError(None, "line_too_large", f"it has {line.size} bytes; the limit is {max_bytes}.")
    try:
        value = await parse(line.text)
    except SluiceError as error:
        if error.kind is ErrorKind.UNAVAILABLE:  # its turn did not come in time
            raise
        return LineError(None, "invalid_json_line", error.message)
    if not isinstance(value, dict):
        return LineError(None, "invalid_json_line", "it is not a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return LineError(None, "invalid_custom_id", f"custom_id must be 1 to {MAX_CUSTOM_ID} characters.")
    if value.get("method", "POST") != "POST":
        return LineError(custom_id, "invalid_method", "method must be POST.")
    if value.get("url") != endpoint:
        return LineError(custom_id, "invalid_url", f"url must be {endpoint}, the endpoint of the batch.")
    body = value.get("body")
    if not isinstance(body, dict):
        return LineError(custom_id, "invalid_body", "body must be an object.")
    if body.get("stream") or body.get("background"):
        return LineError(custom_id, "invalid_body", "stream and background must be false in a batch.")
    return _request(custom_id, body)


def _request(custom_id: str, body: dict[str, Any]) -> BatchLine:
    needs, model = BodyNeeds.of(body), body.get("model")
    priority = body.pop("priority", None)
    return BatchLine(custom_id, orjson.dumps(body), model if isinstance(model, str) else "", priority, needs)


class CheckedLines:
    """What the check of a whole file found; `broken` has the lines that are no requests.

    Attributes:
        total: lines that are not empty.
        excess: whether there are more broken lines than allowed; the check ended at that one.
    """

    def __init__(self) -> None:
        self.total = 0
        self.broken: dict[int, LineError] = {}
        self.excess = False

    async def check(
        self, lines: AsyncIterator[RawLine], endpoint: str, max_bytes: int, max_broken: int, parse: Parse
    ) -> None:
        """Checks all lines; raises FileLost."""
        ids: set[int] = set()  # hashes, because ids are up to MAX_CUSTOM_ID characters
        async for line in lines:
            self.total += 1
            found = await read_line(line, endpoint, max_bytes, parse)
            if isinstance(found, BatchLine) and hash(found.custom_id) in ids:
                message = "its custom_id is that of an earlier line."
                found = LineError(found.custom_id, "duplicate_custom_id", message)
            if isinstance(found, BatchLine):
                ids.add(hash(found.custom_id))
                continue
            self.broken[line.number] = found
            if len(self.broken) > max_broken:
                self.excess = True
                return
