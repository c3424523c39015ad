"""Packs integers for the `bytes` fields of token ids and block hashes, little-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_SWAP = sys.byteorder == "big"

TokenIds: TypeAlias = Sequence[int] | bytes
"""Token ids, or the same ids as packed u32."""


def _pack(code: str, values: Iterable[int]) -> bytes:
    packed = array(code, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> array[int]:
    values = array(code)
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values


def pack_u32(values: Iterable[int]) -> bytes:
    """Packs ids, 4 bytes each; raises OverflowError for one that is negative or not below 2**32."""
    return _pack("I", values)


def unpack_u32(data: bytes) -> array[int]:
    """Unpacks ids; raises ValueError if the length is not a multiple of 4."""
    return _unpack("I", data)


def pack_u64(values: Iterable[int]) -> bytes:
    """Packs hashes, 8 bytes each; raises OverflowError for one that is negative or not below 2**64."""
    return _pack("Q", values)


def unpack_u64(data: bytes) -> array[int]:
    """Unpacks hashes; raises ValueError if the length is not a multiple of 8."""
    return _unpack("Q", data)


def packed_ids(token_ids: TokenIds) -> bytes:
    """Returns token ids as packed u32; raises ValueError for truncated packed ids."""
    if not isinstance(token_ids, bytes):
        return pack_u32(token_ids)
    if len(token_ids) % 4:
        raise ValueError(f"packed token ids have {len(token_ids)} bytes, which is not a multiple of 4")
    return token_ids
