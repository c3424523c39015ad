"""Packed integers: the `bytes` fields that carry token ids and block hashes (little-endian, see common.proto)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from services.common.base.errors import invalid

_SWAP = sys.byteorder == "big"


def _pack(code: str, values: Iterable[int]) -> bytes:
    packed = values if isinstance(values, array) and values.typecode == code else array(code, values)
    if _SWAP:
        packed = array(code, packed)
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, size: int, data: bytes, field: str) -> array[int]:
    if len(data) % size:
        raise invalid(f"{field} has {len(data)} bytes, which is not a multiple of {size}.", param=field)
    values = array(code)
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values


def pack_u32(values: Iterable[int]) -> bytes:
    """Packs ids below 2**32; raises OverflowError for larger ones."""
    return _pack("I", values)


def unpack_u32(data: bytes, field: str = "token_ids") -> array[int]:
    """Unpacks ids; raises SluiceError(INVALID_ARGUMENT) naming `field` when it is truncated."""
    return _unpack("I", 4, data, field)


def pack_u64(values: Iterable[int]) -> bytes:
    """Packs hashes below 2**64; raises OverflowError for larger ones."""
    return _pack("Q", values)


def unpack_u64(data: bytes, field: str = "block_hashes") -> array[int]:
    """Unpacks hashes; raises SluiceError(INVALID_ARGUMENT) naming `field` when it is truncated."""
    return _unpack("Q", 8, data, field)
