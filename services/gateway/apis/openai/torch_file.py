"""Reads files of `torch.save` that contain one tensor, without torch.

Such a file is a zip of a pickle and the tensor's values. A pickle is a program, but this reader does not execute it: it
interprets only the opcodes that `torch.save` uses for a tensor, as data, and imports and calls nothing.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

MAGIC = b"PK\x03\x04"
_MAX_ENTRIES = 64
"""Files in an archive of `prompt_embeds`; an archive with more is refused with INVALID_ARGUMENT."""
_MAX_PICKLE_BYTES = 4_096
"""Bytes of the description in an archive of `prompt_embeds`; a longer one is refused with INVALID_ARGUMENT."""
_MAX_ENTRY_NAME = 128
"""Characters of the name of the data in an archive of `prompt_embeds`; the rest is ignored."""
_CHUNK = 1 << 16
_REBUILD = "torch._utils _rebuild_tensor_v2"
_NO_HOOKS = "collections OrderedDict"
_FAULTS = (
    zipfile.BadZipFile,
    *(ValueError, LookupError, TypeError, EOFError, OverflowError, struct.error),
    *(NotImplementedError, RuntimeError, MemoryError),  # raised by zipfile for unsupported archives
)


class Table(NamedTuple):
    """A two-dimensional tensor; `values` are little-endian float32 in row-major order."""

    values: bytes
    rows: int
    width: int


class NotReadableError(ValueError):
    """Raised for files that cannot be read; the message completes a sentence that begins with "it"."""


def read_tensor(data: bytes) -> Table:
    """Returns a floating-point tensor of shape [rows, width] or [1, rows, width]; raises NotReadableError otherwise."""
    if data.count(b"PK\x01\x02") > _MAX_ENTRIES:
        raise NotReadableError("has more entries than torch.save writes")
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            return _read(archive)
    except NotReadableError:
        raise
    except _FAULTS:
        raise NotReadableError("is not a complete file of torch.save") from None


@dataclass(frozen=True, slots=True)
class _Name:
    text: str


@dataclass(frozen=True, slots=True)
class _Call:
    name: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class _Stored:
    key: Any


def _read(archive: zipfile.ZipFile) -> Table:
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    if folder + "byteorder" in archive.namelist() and _entry(archive, folder + "byteorder", 16) != b"little":
        raise NotReadableError("is not little-endian")
    match _interpret(_entry(archive, pickled, _MAX_PICKLE_BYTES)):
        case _Call(
            _Name(text=name),
            (_Stored(("storage", _Name(text=kind), str(key), str(), int(count))), int(offset), shape, strides, *_),
        ) if name == _REBUILD:
            pass
        case _:
            raise NotReadableError("contains something other than one tensor")
    number = _NUMBERS.get(kind)
    if number is None:
        raise NotReadableError(f"contains values of {kind[:60]}, which is not a floating-point type")
    rows, width = _contiguous_shape(shape, strides)
    if offset < 0 or offset + rows * width > count:
        raise NotReadableError("declares a tensor that is longer than its values")
    stored = _entry(archive, f"{folder}data/{key[:_MAX_ENTRY_NAME]}", count * number.size)
    values = stored[offset * number.size : (offset + rows * width) * number.size]
    if len(values) != rows * width * number.size:
        raise NotReadableError(f"has {len(values)} bytes of values instead of {rows * width * number.size}")
    return Table(number.widen(values), rows, width)


def _entry(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Returns an entry of the file; entries must be uncompressed, so none is larger than the file."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
        raise NotReadableError("has entries that torch.save does not write")
    return archive.read(info)


def _contiguous_shape(shape: Any, strides: Any) -> tuple[int, int]:
    if not isinstance(shape, tuple) or not all(type(size) is int and size > 0 for size in shape):
        raise NotReadableError("must contain a tensor of shape [tokens, width]")
    if len(shape) == 3 and shape[0] == 1:
        shape, strides = shape[1:], strides[1:]
    if len(shape) != 2:
        raise NotReadableError("must contain a tensor of shape [tokens, width]")
    rows, width = shape
    if any(size > 1 and stride != expected for size, stride, expected in zip(shape, strides, (width, 1), strict=True)):
        raise NotReadableError("contains a non-contiguous tensor; save tensor.contiguous()")
    return rows, width


def _interpret(pickled: bytes) -> Any:
    """Returns what a pickle describes, as plain data.

    Raises:
        NotReadableError: it uses an opcode or a name that tensors do not need.
        ValueError, LookupError, TypeError: it is malformed.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                (result,) = stack
                return result
            case "GLOBAL":
                stack.append(_Name(_allowed(str(argument))))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                start = marks.pop() if opcode.name == "TUPLE" else len(stack) - int(opcode.name[5:])
                stack[start:] = [tuple(stack[start:])]
            case "BINPUT":
                memo[argument] = stack[-1]
            case "BINGET":
                stack.append(memo[argument])
            case "BINPERSID":
                stack.append(_Stored(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_Call(stack.pop(), arguments))
            case _:
                raise NotReadableError("contains something other than one tensor")
    raise EOFError


def _allowed(name: str) -> str:
    module, _, kind = name.partition(" ")
    if name in (_REBUILD, _NO_HOOKS) or (module == "torch" and kind.endswith("Storage")):
        return name
    raise NotReadableError(f"names {name[:60]!r}, which tensors do not need; it was not executed")


@dataclass(frozen=True, slots=True)
class _Number:
    """A number format: bytes per number, and the conversion of many to float32."""

    size: int
    widen: Callable[[bytes], bytes]


def _of_format(letter: str) -> Callable[[bytes], bytes]:
    size = struct.calcsize(f"<{letter}")

    def widen(values: bytes) -> bytes:
        converted = []
        for start in range(0, len(values), _CHUNK):  # in chunks, between which other threads can run
            chunk = values[start : start + _CHUNK]
            numbers = struct.unpack(f"<{len(chunk) // size}{letter}", chunk)
            try:
                converted.append(struct.pack(f"<{len(numbers)}f", *numbers))
            except OverflowError:
                raise NotReadableError("contains a number that is too large for float32") from None
        return b"".join(converted)

    return widen


def _of_bfloat16(values: bytes) -> bytes:
    wide = bytearray(2 * len(values))
    wide[2::4], wide[3::4] = values[0::2], values[1::2]
    return bytes(wide)


_NUMBERS: Mapping[str, _Number] = {
    "torch FloatStorage": _Number(4, bytes),
    "torch BFloat16Storage": _Number(2, _of_bfloat16),
    "torch HalfStorage": _Number(2, _of_format("e")),
    "torch DoubleStorage": _Number(8, _of_format("d")),
}
