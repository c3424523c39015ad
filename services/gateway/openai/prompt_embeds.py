"""Prompt embeddings: base64 of a .npy file, which `numpy.save` writes and which needs no library to be read."""

from __future__ import annotations

import ast
import base64
import binascii
import struct

from services.common.errors import SluiceError, invalid
from services.gateway.generation import EmbedsPrompt

FIELD = "prompt_embeds"
_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4_096


def read_prompt_embeds(encoded: str) -> EmbedsPrompt:
    """The embeddings; SluiceError(INVALID_ARGUMENT) for anything but float32 of shape [tokens, width] in C order."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("it is no base64") from None
    if not data.startswith(_MAGIC) or len(data) < 12:
        raise _wrong("it is no .npy file")
    wide = data[6] > 1
    length = struct.unpack_from("<I" if wide else "<H", data, 8)[0]
    start = 8 + (4 if wide else 2)
    if length > _MAX_HEADER or start + length > len(data):
        raise _wrong("its header is longer than the file")
    rows, width = _shape(data[start : start + length])
    values = data[start + length :]
    if len(values) != 4 * rows * width:
        raise _wrong(f"its shape says {4 * rows * width} bytes, but there are {len(values)}")
    return EmbedsPrompt(values, width)


def _shape(header: bytes) -> tuple[int, int]:
    try:
        said = ast.literal_eval(header.decode("latin-1").strip())
        kind, fortran, shape = said["descr"], said["fortran_order"], said["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise _wrong("its header cannot be read") from None
    if kind != "<f4" or fortran is not False:
        raise _wrong("it must hold little-endian float32 in C order")
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise _wrong("its shape must be [tokens, width]")
    return shape[0], shape[1]


def _wrong(why: str) -> SluiceError:
    return invalid(f"Invalid value for {FIELD}: {why}.", param=FIELD, code="invalid_value")
