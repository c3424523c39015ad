"""Refuses large messages of tiny parts before they are parsed.

An empty part takes 2 bytes of a message and a hundred bytes once parsed: 64 MiB of them become gigabytes, and seconds
of the event loop. Messages below FREE_BYTES pass unseen, so that ordinary ones cost nothing.

The check itself takes 10 ms for each MiB. `PacedFrames` runs it in slices, in turns of all streams of a process. It
looks at bytes, of which columns of small numbers have many that look like parts; a message with too many of these is
walked through, field by field, before it is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.intake.pace import BodyPace

log = logging.getLogger(__name__)

FREE_BYTES = 256 << 10
SLICE_BYTES = 128 << 10
"""Bytes that a slice of a check scans, which takes a millisecond."""
SLICE_FIELDS = 1_024
"""Fields of the message itself that a slice reads."""
MAX_WAIT_S = 600.0
"""Seconds that a large message waits for its turn to be checked; then its stream ends."""
BYTES_PER_TINY_PART = 512
"""Bytes of a message for which it may have one part of less than 4 bytes more."""
TINY_BYTES = 4
MIN_TINY_PARTS = 16_384
"""Parts of less than 4 bytes that any message may have; with more it is refused, budget `worker_frames`."""

M = TypeVar("M", bound=Message)

_TINY = Budget("worker_frames", MIN_TINY_PARTS, "")
_TINY_PART = re.compile(rb"[\x0a\x12\x1a\x22\x2a\x32\x3a\x42\x4a\x52\x5a\x62\x6a\x72\x7a][\x00-\x03]")
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


def check_frame(data: bytes, descriptor: Descriptor) -> None:
    """Raises SluiceError (TOO_LARGE) for a large message with too many tiny parts; malformed ones pass, to the parser.

    Args:
        descriptor: of the message.
    """
    for _ in frame_slices(data, descriptor):
        pass


def frame_slices(data: bytes, descriptor: Descriptor) -> Iterator[None]:
    """Checks as `check_frame` does, and yields after every SLICE_BYTES and every SLICE_FIELDS."""
    if len(data) <= FREE_BYTES:
        return
    messages = {field.number for field in descriptor.fields if field.type == FieldDescriptor.TYPE_MESSAGE}
    at, fields, tiny, most = 0, 0, 0, MIN_TINY_PARTS + len(data) // BYTES_PER_TINY_PART
    while at < len(data) and tiny <= most:
        fields += 1
        tiny += 1  # each field of the message itself
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _LENGTH:
            length, at = _varint(data, at)
            end = min(at + length, len(data))
            if key >> 3 in messages:
                while at < end and tiny <= most:
                    last = min(at + SLICE_BYTES, end)
                    tiny += _tiny_parts(data, at, last, most - tiny)
                    at = last
                    if last < end:
                        yield
            at = end
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            return
        if fields % SLICE_FIELDS == 0:
            yield
    if tiny > most and (yield from _walked_parts(data, descriptor, most)) > most:
        raise _TINY.refuse(
            f"A message of {len(data)} bytes has more than {most} parts of less than 4 bytes", kind=ErrorKind.TOO_LARGE
        )


def _walked_parts(data: bytes, descriptor: Descriptor, most: int) -> Generator[None, None, int]:
    """Returns the number of tiny parts, of fields only, counted up to one more than `most`; yields after slices."""
    open_messages = [(len(data), _nested(descriptor))]  # each with its end and its fields that are messages
    at, count, fields = 0, 0, 0
    while open_messages and count <= most:
        end, nested = open_messages[-1]
        if at >= end:
            open_messages.pop()
            continue
        fields += 1
        key, at = _varint(data, at)
        kind, length = key & 7, _FIXED_SIZES.get(key & 7, 0)
        if kind in (_LENGTH, _VARINT):
            length, at = _varint(data, at)
        elif not length:
            break  # malformed, or a group, which no message has
        count += len(open_messages) == 1 or (kind == _LENGTH and length < TINY_BYTES)
        if kind == _LENGTH and (inner := nested.get(key >> 3)) is not None:
            open_messages.append((min(at + length, end), _nested(inner)))
        elif kind != _VARINT:
            at += length
        if fields % SLICE_FIELDS == 0:
            yield
    return count


@cache
def _nested(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Returns the types of a message's fields that are messages, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _tiny_parts(data: bytes, start: int, end: int, most: int) -> int:
    """Returns the number of tiny parts of a range, counted up to one more than `most`."""
    count = 0
    for _ in _TINY_PART.finditer(data, start, end):
        count += 1
        if count > most:
            break
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number and the position after it; the end of the data for one that is malformed."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, len(data)


def guarded(message: type[M]) -> Callable[[bytes], M]:
    """Returns a function that parses messages of a type after checking them."""
    descriptor, parse = cast("Descriptor", message.DESCRIPTOR), message.FromString

    def deserialize(data: bytes) -> M:
        if len(data) > FREE_BYTES:
            check_frame(data, descriptor)
        return parse(data)

    return deserialize


class PacedFrames(Generic[M]):
    """Parses the messages of peers' streams; the large ones of all streams have turns with pauses between them.

    A stream is not read while a message of it waits, so that each holds one.
    """

    def __init__(self, message: type[M], pace: BodyPace | None = None) -> None:
        self._descriptor, self._from_bytes = cast("Descriptor", message.DESCRIPTOR), message.FromString
        self._pace = pace or BodyPace()

    async def parse(self, data: bytes) -> M | None:
        """Returns a message; None if it is malformed or refused, which is logged."""
        try:
            if len(data) > FREE_BYTES:
                await self._pace.turn(MAX_WAIT_S, frame_slices(data, self._descriptor))
            return self._from_bytes(data)
        except (SluiceError, DecodeError) as error:
            log.warning("refused a message of %d bytes: %s", len(data), error)
            return None


def with_guard(handler: Any) -> Any:
    """Returns the handler of a method, whose requests are checked if they are messages."""
    message = getattr(handler.request_deserializer, "__self__", None)
    if not isinstance(message, type) or not issubclass(message, Message):
        return handler
    return handler._replace(request_deserializer=guarded(message))
