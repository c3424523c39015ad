"""Files of torch.save, made here as torch writes them, byte for byte, and read without it."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.apis.openai.torch_file import NotReadableError, read_tensor


def number(value: int) -> bytes:
    return b"K" + bytes([value])


def described(
    shape: tuple[int, ...] = (3, 4), strides: tuple[int, ...] = (4, 1), offset: int = 0, kind: str = "FloatStorage"
) -> bytes:
    """data.pkl of a tensor of 12 numbers."""

    def few(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"((X\x07\x00\x00\x00storageq\x01ctorch\n" + kind.encode() + b"\nq\x02X\x01\x00\x00\x000q\x03"
    where = b"X\x03\x00\x00\x00cpuq\x04K\x0ctq\x05Q"
    rest = b"\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    start = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00"
    return start + storage + where + number(offset) + few(shape) + few(strides) + rest


def file(pickled: bytes, numbers: bytes, order: bytes = b"little", compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in (("data.pkl", pickled), ("byteorder", order), ("data/0", numbers), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def packed(kind: str = "f", values: int = 12) -> bytes:
    return struct.pack(f"<{values}{kind}", *range(values))


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("FloatStorage", packed()),
        ("DoubleStorage", packed("d")),
        ("HalfStorage", packed("e")),
        ("BFloat16Storage", b"".join(struct.pack("<f", value)[2:] for value in range(12))),
    ],
)
def test_every_kind_of_number_becomes_float32(kind: str, numbers: bytes) -> None:
    assert read_tensor(file(described(kind=kind), numbers)) == (packed(), 3, 4)


def test_a_batch_of_one() -> None:
    assert read_tensor(file(described((1, 3, 4), (12, 4, 1)), packed())) == (packed(), 3, 4)


def test_a_part_of_a_larger_tensor() -> None:
    assert read_tensor(file(described((2, 4), offset=4), packed())) == (packed()[16:], 2, 4)


def test_one_row_whatever_its_stride() -> None:
    assert read_tensor(file(described((1, 4), (7, 1)), packed())) == (packed()[:16], 1, 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file(described((12,), (1,)), packed()), "shape"),
        (file(described((2, 3, 2), (6, 2, 1)), packed()), "shape"),
        (file(described((0, 4)), packed()), "shape"),
        (file(described((4, 3), (1, 4)), packed()), "contiguous"),
        (file(described(offset=4), packed()), "longer"),
        (file(described(), packed()[:-1]), "bytes of values"),
        (file(described(), packed() + b"more"), "entries"),
        (file(described(), packed(), b"big"), "little-endian"),
        (file(described(), packed(), compression=zipfile.ZIP_DEFLATED), "entries"),
        (file(described(kind="LongStorage"), packed()), "floating-point"),
        (file(described(kind="DoubleStorage"), struct.pack("<12d", *[1e300] * 12)), "too large"),
        (file(b"\x80\x02X\x02\x00\x00\x00hi.", packed()), "one tensor"),
        (file(b"\x80\x02.", packed()), "complete file"),
        (file(b"", packed()), "complete file"),
        (file(b"(" * 4_096 + b".", packed()), "entries"),
        (file(described(), packed())[:-30], "complete file"),
        (b"PK\x03\x04" + b"PK\x01\x02" * 1_000, "more entries"),
    ],
)
def test_what_is_no_table(data: bytes, message: str) -> None:
    with pytest.raises(NotReadableError, match=message):
        read_tensor(data)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_not_run(tmp_path: Path, protocol: int) -> None:
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung), protocol)
    with pytest.raises(NotReadableError):
        read_tensor(file(trap, packed()))
    assert not sprung.exists()
    pickle.loads(trap)
    assert sprung.exists(), "no trap at all"


def test_pickle_with_a_foreign_name_raises_an_error_that_names_it() -> None:
    with pytest.raises(NotReadableError, match=r"posix system.*it was not executed"):
        read_tensor(file(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.", packed()))


@given(st.data())
def test_broken_files_are_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    whole = bytearray(file(described(), packed()) if data.draw(st.booleans()) else described())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    broken = bytes(whole[: data.draw(st.integers(1, len(whole)))])
    for made in (broken, file(broken, packed())):
        with contextlib.suppress(NotReadableError):
            assert read_tensor(made).rows > 0
