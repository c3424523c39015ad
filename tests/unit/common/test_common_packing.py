"""Packed integers are little-endian, whole, and the same after a round trip."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import packing
from services.common.errors import ErrorKind, SluiceError
from services.common.packing import pack_u32, pack_u64, unpack_u32, unpack_u64


def test_bytes_on_the_wire() -> None:
    assert pack_u32([1, 2**32 - 1]) == bytes([1, 0, 0, 0, 255, 255, 255, 255])
    assert pack_u64([258]) == bytes([2, 1, 0, 0, 0, 0, 0, 0])
    assert pack_u32([]) == b""


def test_bytes_on_the_wire_of_a_big_endian_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SWAP", True)
    values = array("I", [1, 2])
    assert pack_u32(values) == bytes([0, 0, 0, 1, 0, 0, 0, 2])  # this machine's order, swapped
    assert list(values) == [1, 2]
    assert list(unpack_u32(pack_u32(values))) == [1, 2]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_u32_round_trip(values: list[int]) -> None:
    assert list(unpack_u32(pack_u32(values))) == values
    assert pack_u32(iter(values)) == pack_u32(array("I", values)) == pack_u32(array("Q", values))


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_u64_round_trip(values: list[int]) -> None:
    assert list(unpack_u64(pack_u64(values))) == values


@pytest.mark.parametrize("value", [-1, 2**32])
def test_ids_out_of_range_do_not_wrap(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


@pytest.mark.parametrize("length", [1, 3, 5])
def test_truncated_field_is_named(length: int) -> None:
    with pytest.raises(SluiceError, match="prompt has") as refused:
        unpack_u32(b"x" * length, "prompt")
    assert (refused.value.kind, refused.value.param) == (ErrorKind.INVALID_ARGUMENT, "prompt")
    with pytest.raises(SluiceError):
        unpack_u64(b"x" * 4)
