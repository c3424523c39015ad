"""Validates the image blocks of the Messages API."""

from __future__ import annotations

from typing import Any

from services.common.apis.field_reader import FieldReader
from services.common.base.errors import invalid
from services.common.types.media.parts import MediaInput, MediaLimits, media_of_base64, media_of_url
from services.common.types.media.spans import MediaKind

_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def has_image(content: Any) -> bool:
    """Returns whether content is a list with an image block."""
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in content)


def read_image(block: FieldReader, limits: MediaLimits, before: int) -> MediaInput:
    """Returns the item of an image block.

    Args:
        before: number of items of the request before this one.

    Raises:
        SluiceError: INVALID_ARGUMENT or TOO_LARGE, naming the block or one of its fields.
    """
    block.fields("type", "source", "cache_control")
    path = block.path
    if before >= limits.items:
        message = f"{path} is one media item too many; send at most {limits.items}."
        raise invalid(message, param=path, code="too_many_media")
    source = block.under("source")
    if isinstance(source.value, dict) and source.value.get("type") == "file":
        raise source.under("type").unsupported("send the image as base64 or url")
    if source.kind("base64", "url") == "url":
        return media_of_url(source.fields("type", "url").under("url").text(), MediaKind.IMAGE, path, limits)
    source.fields("type", "media_type", "data")
    media_type = source.under("media_type").choice(*_TYPES)
    return media_of_base64(source.under("data").text(), MediaKind.IMAGE, path, limits, media_type)
