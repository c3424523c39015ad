"""Media files in parts: checked, bounded, and never dropped while a request uses them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash
from services.worker.media.store import MediaStore
from services.worker.media.uploads import MAX_UPLOADS, PART_BYTES, STALE_S, IncomingMedia, MediaPart
from tests.support.oracles.errors import raises_error


class Session:
    """One session with a store, and a clock that tests set."""

    def __init__(self, store: MediaStore, most_bytes: int = 1 << 20) -> None:
        self.dropped: list[bytes] = []
        self.now_s = 0.0
        self.uploads = IncomingMedia(store, most_bytes, self.dropped.append, lambda: self.now_s)

    def send(self, data: bytes, part_bytes: int = PART_BYTES, named: bytes = b"") -> bytes:
        content = named or content_hash(data)
        for offset in range(0, len(data), part_bytes):
            self.part(content, len(data), offset, data[offset : offset + part_bytes])
        return content

    def part(self, content: bytes, size: int, offset: int, data: bytes) -> None:
        self.uploads.receive(MediaPart(content, size, offset, data, "image/png"))

    def find(self, content: bytes) -> bytes:
        (item,) = self.uploads.items([MediaSpan(MediaKind.IMAGE, content, 0, 1)])
        assert item.file.hash == content
        return item.file.data


@given(st.binary(min_size=1, max_size=200), st.integers(1, 64))
def test_a_file_in_parts_of_any_size_is_found_whole(data: bytes, part_bytes: int) -> None:
    store = MediaStore(1_000)
    session = Session(store)
    assert session.find(session.send(data, part_bytes)) == data
    assert store.used == len(data)


def test_a_file_with_another_hash_is_discarded_and_fails_its_requests() -> None:
    store = MediaStore(1_000)
    session = Session(store)
    wrong = session.send(b"a picture", named=content_hash(b"another picture"))
    assert store.used == 0
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="media_mismatch", param="media"):
        session.find(wrong)
    assert session.find(session.send(b"another picture")) == b"another picture"


def test_a_file_that_was_never_sent_is_missing_and_may_be_sent_again() -> None:
    with raises_error(code="media_missing", param="media") as refused:
        Session(MediaStore(1_000)).find(content_hash(b"a"))
    assert refused.value.retryable


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([(10, 5, b"56789")], "malformed_media"),
        ([(10, 0, b"01234"), (10, 6, b"6789")], "malformed_media"),
        ([(10, 0, b"01234"), (11, 5, b"56789")], "malformed_media"),
        ([(10, 0, b"0123456789a")], "malformed_media"),
        ([(10, 0, b"")], "malformed_media"),
        ([(1 << 20, 0, b"a" * (PART_BYTES + 1))], "malformed_media"),
        ([((1 << 20) + 1, 0, b"a")], "media_too_large"),
        ([(0, 0, b"a")], "media_too_large"),
    ],
)
def test_faulty_parts_discard_their_upload_and_fail_its_requests(
    parts: list[tuple[int, int, bytes]], code: str
) -> None:
    store = MediaStore(4 << 20)
    session, content = Session(store), content_hash(b"0123456789")
    for size, offset, data in parts:
        session.part(content, size, offset, data)
    assert store.used == 0
    with raises_error(code=code):
        session.find(content)


def test_a_part_with_a_short_hash_leaves_nothing_behind() -> None:
    store = MediaStore(1_000)
    Session(store).part(b"short", 1, 0, b"a")
    assert store.used == 0


def test_the_least_recently_used_file_makes_way_and_its_senders_are_told() -> None:
    store = MediaStore(30)
    one, other = Session(store), Session(store)
    first, second = one.send(b"1" * 10), one.send(b"2" * 10)
    assert other.send(b"1" * 10) == first
    one.find(first)
    third = one.send(b"3" * 15)
    assert one.dropped == [second]
    assert other.dropped == []
    one.send(b"4" * 15)
    assert one.dropped == [second, first]
    assert other.dropped == [first]
    assert store.used <= 30
    assert one.find(third)


def test_files_in_use_are_not_dropped_and_refuse_others() -> None:
    store = MediaStore(20)
    session = Session(store)
    used = session.send(b"1" * 15)
    store.pin([used, used])
    store.unpin([used])
    refused = session.send(b"2" * 10)
    with raises_error(kind=ErrorKind.OVERLOADED):
        session.find(refused)
    assert session.find(used)
    store.unpin([used])
    assert session.find(session.send(b"2" * 10))
    assert session.dropped == [used]


def test_unfinished_uploads_take_up_room_until_their_session_ends() -> None:
    store = MediaStore(20)
    begun, other = Session(store), Session(store)
    begun.part(content_hash(b"x"), 15, 0, b"1")
    refused = other.send(b"2" * 10)
    with pytest.raises(SluiceError, match="leave no room"):
        other.find(refused)
    begun.uploads.close()
    assert store.used == 0
    assert other.find(other.send(b"2" * 10))


def test_unfinished_uploads_are_bounded_and_stale_ones_make_way() -> None:
    store = MediaStore(1_000)
    session = Session(store)
    for number in range(MAX_UPLOADS):
        session.part(content_hash(bytes([number])), 2, 0, b"1")
    refused = session.send(b"22")
    with raises_error(code="malformed_media"):
        session.find(refused)
    session.now_s = STALE_S + 1
    assert session.find(session.send(b"22"))
    assert store.used == 2


def test_a_session_that_ended_is_not_told_of_drops() -> None:
    store = MediaStore(10)
    gone, other = Session(store), Session(store)
    gone.send(b"1" * 10)
    gone.uploads.close()
    other.send(b"2" * 10)
    assert gone.dropped == []


def test_the_same_file_of_another_session_is_kept_once_and_not_replaced() -> None:
    store = MediaStore(20)
    honest, lying = Session(store), Session(store)
    content = honest.send(b"1" * 10)
    lying.send(b"2" * 10, named=content)
    assert lying.find(content) == b"1" * 10
    assert store.used == 10
