"""Prompt embeddings: base64 of a file of `torch.save` or `numpy.save`, which need no library to be read."""

from __future__ import annotations

import ast
import base64
import binascii
import struct

from services.common.errors import SluiceError, invalid
from services.gateway.apis.openai import torch_file
from services.gateway.core.request import EmbedsPrompt

FIELD = "prompt_embeds"
_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4_096


def read_prompt_embeds(encoded: str) -> EmbedsPrompt:
    """The embeddings, [tokens, width]; takes as long as a large request is.

    Raises:
        SluiceError: INVALID_ARGUMENT for anything but one floating-point tensor saved by torch, or a .npy file of
            float32 in C order. Nothing of the file is run.
    """
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("it is no base64") from None
    if data.startswith(torch_file.MAGIC):
        return _of_torch(data)
    if data.startswith(_MAGIC) and len(data) >= 12:
        return _of_numpy(data)
    raise _wrong("it is neither what torch.save writes (its zip format) nor a .npy file")


def _of_torch(data: bytes) -> EmbedsPrompt:
    try:
        table = torch_file.read_tensor(data)
    except torch_file.NotReadableError as error:
        raise _wrong(f"it {error}") from None
    return EmbedsPrompt(table.values, table.width)


def _of_numpy(data: bytes) -> EmbedsPrompt:
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
