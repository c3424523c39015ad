"""Takes media items out of the messages of a chat.

A client's part, such as OpenAI's `{"type": "image_url", "image_url": {"url": …}}`, is taken out of its message: what
remains is a reference, `{"type": "image", "media": 0}`, to the first of the items that travel beside the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pybase64

from services.common.base.errors import ErrorKind, SluiceError, invalid, quoted
from services.common.types.media.spans import MediaKind

MAX_URL = 8_192
"""Characters of an https URL of a media item; a longer one is refused with INVALID_ARGUMENT."""
DETAILS = ("auto", "low", "high")
AUDIO_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg"}


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A media item as a client sent it: the file, or where to fetch it.

    Attributes:
        part: its content part in the client's request, for errors.
        data: the encoded file; empty with `url`.
        url: https URL; empty with `data`.
        media_type: as declared by the client; may be empty.
        detail: one of DETAILS; empty: unset.
    """

    part: str
    kind: MediaKind
    data: bytes = b""
    url: str = ""
    media_type: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds on the media items of one request.

    Attributes:
        items: most items.
        item_bytes: most bytes of one encoded file.
        total_bytes: most bytes of all files together, which travel in one message.
    """

    items: int = 100
    item_bytes: int = 20 << 20
    total_bytes: int = 48 << 20


def take_media(
    messages: Sequence[Any], limits: MediaLimits, where: str = "messages"
) -> tuple[list[Any], list[MediaInput]]:
    """Takes the media items out of OpenAI messages.

    Args:
        where: name of the messages in errors.

    Returns:
        The messages with references in place of the items, and the items. Messages without items are the same objects;
        what is not a well-formed message is left for the validation of messages.

    Raises:
        SluiceError: INVALID_ARGUMENT or TOO_LARGE, naming the part, such as `messages[2].content[1]`.
    """
    taken: list[MediaInput] = []
    found: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(_is_media(part) for part in content):
            parts = [_take(part, f"{where}[{index}].content[{at}]", taken, limits) for at, part in enumerate(content)]
            message = {**message, "content": parts}
        found.append(message)
    if taken:
        check_total(taken, limits)
    return found, taken


def check_total(items: Sequence[MediaInput], limits: MediaLimits) -> None:
    """Raises SluiceError(TOO_LARGE), naming the part, if the files of items are too large together."""
    total = 0
    for item in items:
        total += len(item.data)
        if total > limits.total_bytes:
            raise media_total_too_large(item.part, limits.total_bytes)


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image_url", "input_audio", "video_url", *_REFERENCES)


_REFERENCES = tuple(kind.capability for kind in MediaKind)


def _take(part: Any, where: str, taken: list[MediaInput], limits: MediaLimits) -> Any:
    if not _is_media(part):
        return part
    if len(taken) >= limits.items:
        raise invalid(
            f"{where} is one media item too many; send at most {limits.items}.", param=where, code="too_many_media"
        )
    item = _read_part(part, where, limits)
    taken.append(item)
    return {"type": item.kind.capability, "media": len(taken) - 1}


def _read_part(part: Mapping[str, Any], where: str, limits: MediaLimits) -> MediaInput:
    kind = part["type"]
    if kind == "input_audio":
        return _read_audio(part, where, limits)
    if kind in _REFERENCES:
        raise invalid(f"{where}.type {quoted(kind)} is not supported; send {kind}_url.", param=f"{where}.type")
    value = part.get(kind)
    value = {"url": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise invalid(f"{where}.{kind} must be an object with a url.", param=f"{where}.{kind}")
    detail = value.get("detail")
    if detail is not None and detail not in DETAILS:
        raise invalid(f"{where}.{kind}.detail must be one of {', '.join(DETAILS)}.", param=f"{where}.{kind}.detail")
    media_kind = MediaKind.IMAGE if kind == "image_url" else MediaKind.VIDEO
    return media_of_url(value["url"], media_kind, where, limits, detail or "")


def media_of_url(
    url: str, kind: MediaKind, where: str, limits: MediaLimits, detail: str = "", media_type: str = ""
) -> MediaInput:
    """Returns the item of a data URL or an https URL.

    Raises:
        SluiceError: INVALID_ARGUMENT or TOO_LARGE, naming `where`.
    """
    if url[:5].lower() == "data:":
        head, comma, payload = url.partition(",")
        declared, _, encoding = head[5:].rpartition(";")
        if not comma or encoding.strip().lower() != "base64":
            raise _invalid_media(f"The data URL of {where} must be data:TYPE;base64,DATA.", where)
        return media_of_base64(payload, kind, where, limits, declared.partition(";")[0].strip().lower(), detail)
    if url[:8].lower() != "https://":
        raise _invalid_media(f"The URL of {where} must be a data URL or begin with https://.", where)
    if len(url) > MAX_URL:
        raise _invalid_media(f"The URL of {where} has more than {MAX_URL:,} characters.", where)
    return MediaInput(where, kind, url=url, media_type=media_type, detail=detail)


def media_of_base64(
    payload: str, kind: MediaKind, where: str, limits: MediaLimits, media_type: str, detail: str = ""
) -> MediaInput:
    """Returns the item of a base64 text.

    Raises:
        SluiceError: INVALID_ARGUMENT or TOO_LARGE, naming `where`.
    """
    if len(payload) > (limits.item_bytes + 2) // 3 * 4:
        raise media_too_large(where, limits.item_bytes)
    if kind is MediaKind.IMAGE:
        media_type = ""  # an image's content says what it is; clients label all images as one type
    if media_type and not media_type.startswith(f"{kind.capability}/"):
        raise _invalid_media(
            f"{where} is declared as {quoted(media_type)}, which is not a type of {kind.capability}.", where
        )
    try:
        data = pybase64.b64decode(payload, validate=True)
    except ValueError:
        raise _invalid_media(
            f"The base64 text of {where} is broken; send it without line breaks, padded.", where
        ) from None
    if not data:
        raise _invalid_media(f"{where} is empty; send the bytes of a file.", where)
    return MediaInput(where, kind, data=data, media_type=media_type, detail=detail)


def _read_audio(part: Mapping[str, Any], where: str, limits: MediaLimits) -> MediaInput:
    value = part.get("input_audio")
    if not isinstance(value, dict) or not isinstance(value.get("data"), str):
        raise invalid(f"{where}.input_audio must be an object with data and format.", param=f"{where}.input_audio")
    form = value.get("format")
    if not isinstance(form, str) or form not in AUDIO_TYPES:
        raise invalid(
            f"{where}.input_audio.format must be one of {', '.join(AUDIO_TYPES)}.", param=f"{where}.input_audio.format"
        )
    return media_of_base64(value["data"], MediaKind.AUDIO, where, limits, AUDIO_TYPES[form])


def media_too_large(where: str, limit: int) -> SluiceError:
    """Returns the error of a file over the limit, bytes."""
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"The file of {where} has more than {limit:,} bytes; send a smaller one.",
        param=where,
        code="media_too_large",
    )


def media_total_too_large(where: str, limit: int) -> SluiceError:
    """Returns the error of the file with which those of a request exceed the limit, bytes."""
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"With the file of {where}, the media files of the request have more than {limit:,} bytes; send fewer or "
        "smaller ones.",
        param=where,
        code="media_too_large",
    )


def _invalid_media(message: str, where: str) -> SluiceError:
    return invalid(message, param=where, code="invalid_media")
