"""The server of names of the fault matrix."""

from __future__ import annotations

import struct

import pytest

from tests.support.faults.name_server import answer

ADDRESSES = {"router.suite": "10.77.0.6"}


def query(name: str, kind: int) -> bytes:
    labels = b"".join(bytes((len(label),)) + label.encode() for label in name.split("."))
    return b"\xab\xcd\x01\x00" + struct.pack("!HHHH", 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def test_answer_for_a_known_name_is_its_address() -> None:
    found = answer(query("Router.suite", 1), ADDRESSES)
    assert found[:2] == b"\xab\xcd"
    assert found[3] & 0xF == 0
    assert struct.unpack_from("!H", found, 6) == (1,)
    assert found.endswith(bytes((10, 77, 0, 6)))


@pytest.mark.parametrize(("name", "kind", "code"), [("router.suite", 28, 0), ("other.suite", 1, 3), ("", 1, 3)])
def test_answer_without_an_address_has_none(name: str, kind: int, code: int) -> None:
    asked = query(name, kind) if name else query("x", kind)
    found = answer(asked, ADDRESSES)
    assert found[3] & 0xF == code
    assert struct.unpack_from("!H", found, 6) == (0,)
    assert found[12:] == asked[12:]
