"""Messages between postprocess and processes of parsers: frames of JSON, each with the operations of many streams."""

from __future__ import annotations

import json
import struct
from typing import Any

from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning

HEADER = struct.Struct("<I")
PROGRESS = struct.Struct("<QQ")
"""Shared memory: number of operations started, and the stream of the current one; 0 between batches."""

FRAME_AT_MOST = 64 << 20

_KINDS: dict[str, type[Content | Reasoning | CallStart | CallArguments | Degraded]] = {
    kind.__name__: kind for kind in (Content, Reasoning, CallStart, CallArguments, Degraded)
}


def frame(message: Any) -> bytes:
    """Encodes a message, prefixed with its length."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
    return HEADER.pack(len(body)) + body


def unframe(body: bytes) -> Any:
    """Decodes a frame without its length; raises ValueError if it is invalid."""
    return json.loads(body.decode(errors="surrogatepass"))


def pack_events(events: list[Event]) -> list[list[Any]]:
    """Converts events to JSON values."""
    return [[type(event).__name__, *event] for event in events]


def unpack_events(packed: list[list[Any]]) -> list[Event]:
    """Reverses `pack_events`; raises TypeError, ValueError or KeyError for invalid events."""
    return checked([_KINDS[kind](*fields) for kind, *fields in packed])


def checked(events: list[Event]) -> list[Event]:
    """Returns the events; raises TypeError if one is not an event or has fields of the wrong type."""
    for event in events:
        if type(event) not in _KINDS.values():
            raise TypeError(f"{event!r} is not an event")
        number, *texts = event if isinstance(event, (CallStart, CallArguments)) else (0, *event)
        if not isinstance(number, int) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{event!r} has fields of the wrong type")
    return events


def pack_context(context: ParserContext) -> dict[str, Any]:
    """Converts a context to JSON values."""
    return {
        "tools": list(context.tools),
        "required": context.required,
        "only": context.only,
        "single": context.single,
        "guided": context.guided,
        "prompt_tail": context.prompt_tail,
        "identity": context.identity,
        "prompt_ids": list(context.prompt_ids),
        "template_kwargs": dict(context.template_kwargs),
        "source": context.source,
    }
