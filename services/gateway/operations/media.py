"""Media items in the messages of the APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.media.parts import MediaInput
from services.gateway.backends.workers.capabilities import able
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core.request import ChatPrompt, GenerationRequest, Prompt
from services.gateway.operations.waiting import Gone, result_unless_gone

LARGE_CHARACTERS = 256 << 10
"""Least characters of text in media parts that are decoded in a thread."""

_KINDS = frozenset(("image", "image_url", "input_image", "input_audio", "video_url"))
_NESTED = ("tool_result", "function_call_output", "custom_tool_call_output")

P = ParamSpec("P")
T = TypeVar("T")


def media_needs(media: Sequence[MediaInput]) -> tuple[tuple[str, str], ...]:
    """Returns the capabilities that items require, each with the first part that requires it."""
    first: dict[str, str] = {}
    for item in media:
        first.setdefault(item.kind.capability, item.part)
    return tuple(first.items())


def check_media(registry: WorkerRegistry, model: str, prompt: Prompt) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for media items of a kind that no engine of the model takes."""
    if isinstance(prompt, ChatPrompt) and prompt.media:
        able(registry.of_model(model), media_needs(prompt.media))


async def started_unless_gone(gone: Gone, request: GenerationRequest, start: Coroutine[Any, Any, T]) -> T:
    """Returns the result of starting a request; those with media items end if the caller goes meanwhile.

    Files may take seconds to be fetched and checked. A start without media items is awaited as it is.

    Raises:
        SluiceError: CANCELLED if the client has disconnected.
    """
    if not (isinstance(request.prompt, ChatPrompt) and request.prompt.media):
        return await start
    started = await result_unless_gone(gone, start)
    if started is None:
        raise SluiceError(ErrorKind.CANCELLED, "The client disconnected before the request was started.")
    return started


def release_media(messages: list[Any]) -> None:
    """Drops the content of chat messages with media items, once those are decoded, to free the base64 text."""
    for message in messages:
        if isinstance(message, dict) and _characters_of(message):
            message["content"] = []


async def with_media(value: Any, translate: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `translate(...)`, called in a thread if decoding the media items would block the event loop.

    Args:
        value: the messages or input items that `translate` reads.
    """
    if media_characters(value) < LARGE_CHARACTERS:
        return translate(*args, **kwargs)
    return await asyncio.to_thread(translate, *args, **kwargs)


def media_characters(value: Any) -> int:
    """Returns the characters in the media parts of messages or of input items."""
    if not isinstance(value, list):
        return 0
    return sum(_characters_of(message) for message in value if isinstance(message, dict))


def _characters_of(message: dict[str, Any]) -> int:
    size = 0
    for field in ("content", "output"):
        parts = message.get(field)
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str):
                continue
            if kind in _KINDS:
                size += _longest_text(part)
            elif kind in _NESTED:
                size += _characters_of(part)
    return size


def _longest_text(part: dict[str, Any]) -> int:
    texts = [text for value in part.values() for text in (value.values() if isinstance(value, dict) else (value,))]
    return max((len(text) for text in texts if isinstance(text, str)), default=0)
