"""Files of `torch.save` that hold one tensor, read without torch.

Such a file is a zip of a pickle and of the tensor's numbers. A pickle is a program; this one is not run: it is read as
data by a reader that knows the dozen words with which `torch.save` writes a tensor, and imports and calls nothing.
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
_MOST_ENTRIES = 64
_LONGEST_PICKLE = 4_096
_LONGEST_ENTRY_NAME = 128
_CHUNK = 1 << 16
_REBUILD = "torch._utils _rebuild_tensor_v2"
_NO_HOOKS = "collections OrderedDict"
_FAULTS = (
    zipfile.BadZipFile,
    *(ValueError, LookupError, TypeError, EOFError, OverflowError, struct.error),
    *(NotImplementedError, RuntimeError, MemoryError),  # zipfile's for what it does not read
)


class Table(NamedTuple):
    """A tensor of two dimensions: `values` are little-endian float32, row after row."""

    values: bytes
    rows: int
    width: int


class NotReadableError(ValueError):
    """Says what a file is that it should not be, as the end of a sentence that begins with "it"."""


def read_tensor(data: bytes) -> Table:
    """A floating-point tensor of shape [rows, width], or [1, rows, width]; NotReadableError for anything else."""
    if data.count(b"PK\x01\x02") > _MOST_ENTRIES:
        raise NotReadableError("has more parts than torch.save writes")
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            return _read(archive)
    except NotReadableError:
        raise
    except _FAULTS:
        raise NotReadableError("is no whole file of torch.save") from None


@dataclass(frozen=True, slots=True)
class _Name:
    text: str


@dataclass(frozen=True, slots=True)
class _Call:
    name: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class _Stored:
    about: Any


def _read(archive: zipfile.ZipFile) -> Table:
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    if folder + "byteorder" in archive.namelist() and _entry(archive, folder + "byteorder", 16) != b"little":
        raise NotReadableError("is not little-endian")
    match _described(_entry(archive, pickled, _LONGEST_PICKLE)):
        case _Call(
            _Name(text=name),
            (_Stored(("storage", _Name(text=kind), str(key), str(), int(count))), int(offset), shape, strides, *_),
        ) if name == _REBUILD:
            pass
        case _:
            raise NotReadableError("holds something other than one tensor")
    number = _NUMBERS.get(kind)
    if number is None:
        raise NotReadableError(f"holds numbers of {kind[:60]}, not floating-point ones")
    rows, width = _plain(shape, strides)
    if offset < 0 or offset + rows * width > count:
        raise NotReadableError("says that its tensor is longer than its numbers")
    stored = _entry(archive, f"{folder}data/{key[:_LONGEST_ENTRY_NAME]}", count * number.size)
    values = stored[offset * number.size : (offset + rows * width) * number.size]
    if len(values) != rows * width * number.size:
        raise NotReadableError(f"has {len(values)} bytes of numbers, not {rows * width * number.size}")
    return Table(number.widen(values), rows, width)


def _entry(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A part of the file; torch.save compresses none, so none is larger than the file."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
        raise NotReadableError("has parts that torch.save does not write")
    return archive.read(info)


def _plain(shape: Any, strides: Any) -> tuple[int, int]:
    if not isinstance(shape, tuple) or not all(type(size) is int and size > 0 for size in shape):
        raise NotReadableError("must hold a tensor of shape [tokens, width]")
    if len(shape) == 3 and shape[0] == 1:
        shape, strides = shape[1:], strides[1:]
    if len(shape) != 2:
        raise NotReadableError("must hold a tensor of shape [tokens, width]")
    rows, width = shape
    if any(size > 1 and stride != plain for size, stride, plain in zip(shape, strides, (width, 1), strict=True)):
        raise NotReadableError("holds a tensor whose rows do not follow each other; save tensor.contiguous()")
    return rows, width


def _described(pickled: bytes) -> Any:
    """What a pickle would make, as plain data.

    Raises:
        NotReadableError: it uses a word that no saved tensor needs.
        ValueError, LookupError, TypeError: it is broken.
    """
    stack: list[Any] = []
    marks: list[int] = []
    known: dict[Any, Any] = {}
    for word, argument, _ in pickletools.genops(pickled):
        match word.name:
            case "PROTO":
                pass
            case "STOP":
                (made,) = stack
                return made
            case "GLOBAL":
                stack.append(_Name(_allowed(str(argument))))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(word.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                start = marks.pop() if word.name == "TUPLE" else len(stack) - int(word.name[5:])
                stack[start:] = [tuple(stack[start:])]
            case "BINPUT":
                known[argument] = stack[-1]
            case "BINGET":
                stack.append(known[argument])
            case "BINPERSID":
                stack.append(_Stored(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_Call(stack.pop(), arguments))
            case _:
                raise NotReadableError("holds something other than one tensor")
    raise EOFError


def _allowed(name: str) -> str:
    module, _, kind = name.partition(" ")
    if name in (_REBUILD, _NO_HOOKS) or (module == "torch" and kind.endswith("Storage")):
        return name
    raise NotReadableError(f"names {name[:60]!r}, which no saved tensor needs; nothing of it was run")


@dataclass(frozen=True, slots=True)
class _Number:
    """A kind of numbers: bytes of one, and how many become float32."""

    size: int
    widen: Callable[[bytes], bytes]


def _of_format(letter: str) -> Callable[[bytes], bytes]:
    size = struct.calcsize(f"<{letter}")

    def widen(values: bytes) -> bytes:
        parts = []
        for start in range(0, len(values), _CHUNK):  # in parts, between which other threads have their turn
            part = values[start : start + _CHUNK]
            numbers = struct.unpack(f"<{len(part) // size}{letter}", part)
            try:
                parts.append(struct.pack(f"<{len(numbers)}f", *numbers))
            except OverflowError:
                raise NotReadableError("holds a number that is too large for float32") from None
        return b"".join(parts)

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
