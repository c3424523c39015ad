"""Media files on the session to a worker: parts, turns, and which files are sent."""

from __future__ import annotations

import pytest

from services.common.base.errors import SluiceError
from services.common.types.media.spans import MediaFile, content_hash
from services.gateway.backends.rpc import media_uploads
from services.gateway.backends.rpc.media_uploads import MAX_AT_ONCE, PART_BYTES, MediaUploads, Start, read_hashes
from sluice.v1 import worker_pb2


def file_of(letter: str, size: int) -> MediaFile:
    data = letter.encode() * size
    return MediaFile(content_hash(data), data, "image/png")


def start_of(slot: int) -> Start:
    return worker_pb2.SessionStart(slot=slot), 10


def sent_by(uploads: MediaUploads) -> tuple[list[worker_pb2.MediaChunk], list[int]]:
    parts, slots = [], []
    while uploads:
        part, ready = uploads.next_part()
        parts.append(part)
        slots += [start.slot for start, _ in ready]
    return parts, slots


def test_file_larger_than_a_part_is_sent_in_order_before_its_start() -> None:
    uploads, file = MediaUploads(), file_of("a", 2 * PART_BYTES + 5)
    assert not uploads.add(start_of(1), [file])
    parts, slots = sent_by(uploads)
    assert b"".join(part.data for part in parts) == file.data
    assert [part.offset for part in parts] == [0, PART_BYTES, 2 * PART_BYTES]
    assert {(part.hash, part.size) for part in parts} == {(file.hash, len(file.data))}
    assert [part.media_type for part in parts] == ["image/png", "", ""]
    assert slots == [1]


def test_parts_of_several_files_take_turns_so_that_the_short_one_ends_first() -> None:
    uploads = MediaUploads()
    long, short = file_of("a", 8 * PART_BYTES), file_of("b", 5)
    uploads.add(start_of(1), [long])
    uploads.next_part()
    uploads.add(start_of(2), [short])
    parts, slots = sent_by(uploads)
    assert slots == [2, 1]
    assert [part.hash for part in parts].index(short.hash) <= 1


def test_unfinished_files_are_bounded() -> None:
    uploads = MediaUploads()
    files = [file_of(chr(97 + at), 3 * PART_BYTES) for at in range(2 * MAX_AT_ONCE)]
    uploads.add(start_of(1), files)
    unfinished: set[bytes] = set()
    most = 0
    while uploads:
        part, _ = uploads.next_part()
        unfinished.add(part.hash)
        if part.offset + len(part.data) == part.size:
            unfinished.discard(part.hash)
        most = max(most, len(unfinished))
    assert most == MAX_AT_ONCE


def test_file_is_sent_once_for_several_starts_and_not_for_later_ones() -> None:
    sent: list[tuple[int, bool]] = []
    uploads, file = MediaUploads(lambda size, again: sent.append((size, again))), file_of("a", 5)
    uploads.add(start_of(1), [file, file])
    uploads.add(start_of(2), [file])
    parts, slots = sent_by(uploads)
    assert (len(parts), slots) == (1, [1, 2])
    assert uploads.add(start_of(3), [file])
    assert sent == [(5, False)]


def test_dropped_file_is_sent_again_and_counted_as_such() -> None:
    sent: list[bool] = []
    uploads, file = MediaUploads(lambda size, again: sent.append(again)), file_of("a", 5)
    uploads.add(start_of(1), [file])
    sent_by(uploads)
    uploads.forget(read_hashes(file.hash + b"rest"))
    assert not uploads.add(start_of(2), [file])
    assert sent_by(uploads)[1] == [2]
    assert sent == [False, True]


def test_removed_start_is_never_returned_and_its_unsent_file_is_dropped() -> None:
    uploads, file, other = MediaUploads(), file_of("a", 5), file_of("b", 5)
    uploads.add(start_of(1), [file])
    uploads.add(start_of(2), [other])
    assert uploads.remove(1)
    assert not uploads.remove(1)
    parts, slots = sent_by(uploads)
    assert [part.hash for part in parts] == [other.hash]
    assert slots == [2]


def test_removed_start_with_a_begun_file_lets_the_file_end() -> None:
    uploads, file = MediaUploads(), file_of("a", 2 * PART_BYTES)
    uploads.add(start_of(1), [file])
    uploads.next_part()
    uploads.remove(1)
    parts, slots = sent_by(uploads)
    assert (len(parts), slots) == (1, [])
    assert uploads.add(start_of(2), [file])


def test_too_many_pending_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_uploads, "MAX_PENDING_BYTES", 100)
    uploads = MediaUploads()
    uploads.add(start_of(1), [file_of("a", 80)])
    with pytest.raises(SluiceError, match="Too many media files"):
        uploads.add(start_of(2), [file_of("b", 80)])
    assert sent_by(uploads)[1] == [1]
    assert not uploads.add(start_of(3), [file_of("b", 80)])


def test_new_session_begins_without_files() -> None:
    uploads, file = MediaUploads(), file_of("a", 5)
    uploads.add(start_of(1), [file])
    sent_by(uploads)
    uploads.clear()
    assert not uploads
    assert not uploads.add(start_of(2), [file])
