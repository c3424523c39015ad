"""Chats with media items for the tokenizers of engines: files go in as data URLs, spans come back."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.base.packing import pack_u32
from services.common.types.media.spans import MediaKind, MediaSpan
from services.preprocess.contract.tokenizer import Message
from services.preprocess.contract.validation import typed_placeholder
from services.preprocess.media.expansion import CountedItem
from services.preprocess.media.samples import blank

_KINDS = {kind.capability: kind for kind in MediaKind}
MAX_BYTES = 128 << 20
"""Bytes of the files of one chat, sent as base64 to the engine's process; more are refused with TOO_LARGE."""


def with_files(messages: Sequence[Message], items: Sequence[CountedItem], files: Sequence[bytes]) -> list[Message]:
    """Returns the messages with files in place of the references to items.

    Args:
        files: the encoded file of each item.

    Raises:
        SluiceError: TOO_LARGE for more than MAX_BYTES.
    """
    if sum(map(len, files)) > MAX_BYTES:
        raise SluiceError(
            ErrorKind.TOO_LARGE,
            f"The media items of the chat have more than {MAX_BYTES >> 20} MiB together; send fewer or smaller ones.",
            param=items[0].part,
            code="media_too_large",
        )
    return [_with_files(message, items, files) for message in messages]


def with_blanks(messages: Sequence[Message]) -> list[Message]:
    """Returns `with_files` with the same file for every item of a kind, for what does not depend on the files."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    kinds = [_KINDS[part["type"]] for content in contents for part in content if part.get("type") in _KINDS]
    return with_files(messages, *zip(*map(blank, kinds), strict=True)) if kinds else list(messages)


def _with_files(message: Message, items: Sequence[CountedItem], files: Sequence[bytes]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_file_part(part, items, files) if part.get("type") in _KINDS else part for part in content]
    return {**message, "content": parts}


def _file_part(part: Mapping[str, Any], items: Sequence[CountedItem], files: Sequence[bytes]) -> dict[str, Any]:
    item, data = items[part["media"]], files[part["media"]]
    url = f"data:{item.facts.media_type};base64,{base64.b64encode(data).decode()}"
    name = f"{item.kind.capability}_url"
    return {"type": name, name: {"url": url}, "uuid": item.hash.hex()}


def read_prompt(prompt: Mapping[str, Any], items: Sequence[CountedItem]) -> tuple[bytes, tuple[MediaSpan, ...]]:
    """Returns packed ids and the spans of the items; `prompt` is the form of a `MediaPrompt`.

    Raises:
        SluiceError: INVALID_ARGUMENT if the items do not each replace one placeholder of the prompt's text.
    """
    ids, unexpanded = list(prompt["ids"]), list(prompt["unexpanded_ids"])
    offsets = prompt["spans"]
    spans: list[MediaSpan] = []
    collapsed: list[int] = []
    placeholders: set[int] = set()
    end = 0
    for item, (kind, offset, length) in zip(items, offsets, strict=False):
        collapsed += ids[end:offset]
        if kind != item.kind.capability or offset < end or len(collapsed) >= len(unexpanded):
            raise _not_expressible(item)
        placeholder = unexpanded[len(collapsed)]
        placeholders.add(placeholder)
        collapsed.append(placeholder)
        spans.append(MediaSpan(item.kind, item.hash, offset, length, pack_u32([placeholder]), length))
        end = offset + length
    collapsed += ids[end:]
    if len(offsets) != len(items) or collapsed != unexpanded:
        raise _not_expressible(items[0])
    if sum(map(unexpanded.count, placeholders)) != len(items):
        raise typed_placeholder()
    return pack_u32(ids), tuple(spans)


def _not_expressible(item: CountedItem) -> SluiceError:
    return invalid(
        f"The engine's prompt of {item.part} does not have one placeholder for each media item; send them only in "
        "messages whose role may have them, or serve the model with the processor hf.",
        param=item.part,
        code="invalid_media",
    )
