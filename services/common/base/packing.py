"""Packed integers: the `bytes` fields that carry token ids and block hashes (little-endian, see common.proto)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from services.common.base.errors import SluiceError, invalid

_SWAP = sys.byteorder == "big"


def pack_u32(values: Iterable[int]) -> bytes:
    """Packs ids below 2**32; raises OverflowError for larger ones."""
    if not isinstance(values, array) or values.typecode != "I":
        values = array("I", values)
    return _swapped(values).tobytes() if _SWAP else values.tobytes()


def unpack_u32(data: bytes, field: str = "token_ids") -> array[int]:
    """Unpacks ids; raises SluiceError(INVALID_ARGUMENT) naming `field` when it is truncated."""
    if len(data) % 4:
        raise _truncated(data, 4, field)
    values = array("I")
    values.frombytes(data)
    return _swapped(values) if _SWAP else values


def pack_u64(values: Iterable[int]) -> bytes:
    """Packs hashes below 2**64; raises OverflowError for larger ones."""
    if not isinstance(values, array) or values.typecode != "Q":
        values = array("Q", values)
    return _swapped(values).tobytes() if _SWAP else values.tobytes()


def unpack_u64(data: bytes, field: str = "block_hashes") -> array[int]:
    """Unpacks hashes; raises SluiceError(INVALID_ARGUMENT) naming `field` when it is truncated."""
    if len(data) % 8:
        raise _truncated(data, 8, field)
    values = array("Q")
    values.frombytes(data)
    return _swapped(values) if _SWAP else values


def _swapped(values: array[int]) -> array[int]:
    """Returns a copy in the other byte order."""
    copy = values[:]
    copy.byteswap()
    return copy


def _truncated(data: bytes, size: int, field: str) -> SluiceError:
    return invalid(f"{field} has {len(data)} bytes, which is not a multiple of {size}.", param=field)
