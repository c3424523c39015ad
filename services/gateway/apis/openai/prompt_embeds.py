"""Reads prompt embeddings, base64 of a file of `torch.save` or `numpy.save`, without these libraries."""

from __future__ import annotations

import ast
import base64
import binascii
import struct

from services.common.base.errors import SluiceError, invalid
from services.gateway.apis.openai import torch_file
from services.gateway.core.request import EmbedsPrompt

FIELD = "prompt_embeds"
_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4_096
"""Bytes of the header of a NumPy file of `prompt_embeds`; a longer one is refused with INVALID_ARGUMENT."""


def read_prompt_embeds(encoded: str) -> EmbedsPrompt:
    """Returns the embeddings, [tokens, width]; takes time proportional to their size.

    Raises:
        SluiceError: INVALID_ARGUMENT for anything but one floating-point tensor saved by torch, or a .npy file of
            float32 in C order. No code in the file is executed.
    """
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise _error("it is not valid base64") from None
    if data.startswith(torch_file.MAGIC):
        return _of_torch(data)
    if data.startswith(_MAGIC) and len(data) >= 12:
        return _of_numpy(data)
    raise _error("it is neither a file of torch.save (zip format) nor a .npy file")


def _of_torch(data: bytes) -> EmbedsPrompt:
    try:
        table = torch_file.read_tensor(data)
    except torch_file.NotReadableError as error:
        raise _error(f"it {error}") from None
    return EmbedsPrompt(table.values, table.width)


def _of_numpy(data: bytes) -> EmbedsPrompt:
    wide = data[6] > 1
    length = struct.unpack_from("<I" if wide else "<H", data, 8)[0]
    start = 8 + (4 if wide else 2)
    if length > _MAX_HEADER or start + length > len(data):
        raise _error("its header is longer than the file")
    rows, width = _shape(data[start : start + length])
    values = data[start + length :]
    if len(values) != 4 * rows * width:
        raise _error(f"its shape requires {4 * rows * width} bytes, but it has {len(values)}")
    return EmbedsPrompt(values, width)


def _shape(header: bytes) -> tuple[int, int]:
    try:
        fields = ast.literal_eval(header.decode("latin-1").strip())
        kind, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise _error("its header cannot be read") from None
    if kind != "<f4" or fortran is not False:
        raise _error("it must hold little-endian float32 in C order")
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise _error("its shape must be [tokens, width]")
    return shape[0], shape[1]


def _error(problem: str) -> SluiceError:
    return invalid(f"Invalid value for {FIELD}: {problem}.", param=FIELD, code="invalid_value")
