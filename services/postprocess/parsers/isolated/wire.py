"""Messages between postprocess and processes of parsers: JSON, each with the operations of many streams."""

from __future__ import annotations

import json
import mmap
import tempfile
from struct import Struct
from typing import Any

from services.common.base.sendable_text import is_sendable, sendable
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning

MAX_CALLS = 1 << 16
"""Tool calls of one stream of a custom parser; a parser that reports more fails."""

_KINDS: dict[str, type[Content | Reasoning | CallStart | CallArguments | Degraded]] = {
    kind.__name__: kind for kind in (Content, Reasoning, CallStart, CallArguments, Degraded)
}


def encode(message: Any) -> bytes:
    """Encodes a message."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def decode(body: bytes) -> Any:
    """Decodes a message; raises ValueError if it is invalid."""
    return json.loads(body.decode(errors="surrogatepass"))


class Progress:
    """Memory shared with a process: the number of operations it has started, and the stream of the current one.

    Args:
        descriptor: of the file that both have mapped; 0 to create one.
    """

    _FIELDS = Struct("<QQ")

    def __init__(self, descriptor: int = 0) -> None:
        self._file = open(descriptor, "r+b") if descriptor else tempfile.TemporaryFile()  # noqa: SIM115 - see close
        self._file.truncate(self._FIELDS.size)
        self.descriptor = self._file.fileno()
        self._memory = mmap.mmap(self.descriptor, self._FIELDS.size)

    def set(self, started: int, stream: int) -> None:
        """Records that an operation has started; stream 0 between batches."""
        self._FIELDS.pack_into(self._memory, 0, started, stream)

    def close(self) -> None:
        """Releases the memory."""
        self._memory.close()
        self._file.close()

    @property
    def started(self) -> int:
        """Number of operations started."""
        return int(self._FIELDS.unpack_from(self._memory)[0])

    @property
    def stream(self) -> int:
        """The stream of the current operation; 0 between batches."""
        return int(self._FIELDS.unpack_from(self._memory)[1])


def pack_events(events: list[Event]) -> list[list[Any]]:
    """Converts events to JSON values."""
    return [[type(event).__name__, *event] for event in events]


def unpack_events(packed: list[list[Any]]) -> list[Event]:
    """Reverses `pack_events`; raises TypeError, ValueError or KeyError for invalid events."""
    return checked([_KINDS[kind](*fields) for kind, *fields in packed])


def checked(events: list[Event]) -> list[Event]:
    """Returns the events with sendable texts.

    Raises:
        TypeError: one is not an event, or has fields of the wrong type or a number out of range.
    """
    return [_checked(event) for event in events]


def _checked(event: Event) -> Event:
    if type(event) not in _KINDS.values():
        raise TypeError(f"{event!r} is not an event")
    number, *texts = event if isinstance(event, (CallStart, CallArguments)) else (0, *event)
    if not isinstance(number, int) or not 0 <= number < MAX_CALLS or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{event!r} has fields of the wrong type or a number out of range")
    if all(map(is_sendable, texts)):
        return event
    fields: list[Any] = [sendable(field) if isinstance(field, str) else field for field in event]
    return type(event)(*fields)


def pack_context(context: ParserContext) -> dict[str, Any]:
    """Converts a context to JSON values."""
    sequences = {"tools": list(context.tools), "prompt_ids": list(context.prompt_ids)}
    packed = {**vars(context), **sequences, "template_kwargs": dict(context.template_kwargs)}
    del packed["names"]  # derived from the tools
    return packed
