"""Media files on the session to one worker: which it has, and the parts that are being sent.

A file is sent once for each session, in parts that take turns with those of other files and with the starts of
generations. A generation starts after the last part of its last file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.common.base.errors import overloaded
from services.common.types.media.spans import HASH_BYTES, MediaFile
from sluice.v1 import worker_pb2

PART_BYTES = 256 << 10
MAX_PENDING_BYTES = 256 << 20
"""Bytes of files that wait to be sent to one worker; a request beyond it is refused as OVERLOADED."""
MAX_AT_ONCE = 8
"""Files whose parts take turns, as workers bound the unfinished ones of a session; the others wait."""
MAX_KNOWN = 65_536
"""Files remembered as sent; older ones are sent again."""

Start = tuple[worker_pb2.SessionStart, int]
"""The start of a generation, and its size in bytes."""


@dataclass(slots=True)
class _Upload:
    file: MediaFile
    sent: int = 0


@dataclass(slots=True)
class _Waiting:
    start: Start
    missing: set[bytes]


class MediaUploads:
    """The media files of one session.

    Args:
        on_sent: called with the number of bytes of each file that was sent, and whether it was sent before.
    """

    def __init__(self, on_sent: Callable[[int, bool], None] = lambda size, again: None) -> None:
        self._on_sent = on_sent
        self._known: dict[bytes, None] = {}  # oldest first
        self._again: set[bytes] = set()  # the worker dropped them
        self._uploads: dict[bytes, _Upload] = {}
        self._turns: deque[bytes] = deque()  # unfinished files, the next to send first
        self._waiting: dict[int, _Waiting] = {}
        self._pending = 0

    def __bool__(self) -> bool:
        """Whether there are parts to send."""
        return bool(self._uploads)

    def add(self, start: Start, files: Iterable[MediaFile]) -> bool:
        """Returns whether a generation can start at once; otherwise its missing files are sent first.

        Raises:
            SluiceError: OVERLOADED while too many bytes wait to be sent to the worker.
        """
        missing = {file.hash: file for file in files if file.hash not in self._known}
        if not missing:
            return True
        new = [file for key, file in missing.items() if key not in self._uploads]
        size = sum(len(file.data) for file in new)
        if self._pending and self._pending + size > MAX_PENDING_BYTES:
            raise overloaded("Too many media files wait to be sent to the worker; try again later.")
        self._pending += size
        self._uploads.update((file.hash, _Upload(file)) for file in new)
        self._waiting[start[0].slot] = _Waiting(start, set(missing))
        return False

    def remove(self, slot: int) -> bool:
        """Removes a waiting start, and files that no other start needs unless sending has begun.

        Returns:
            False if no start of the slot was waiting.
        """
        waiting = self._waiting.pop(slot, None)
        if waiting is None:
            return False
        needed = {key for other in self._waiting.values() for key in other.missing}
        for key in waiting.missing - needed:
            if not self._uploads[key].sent:
                self._pending -= len(self._uploads.pop(key).file.data)
        return True

    def next_part(self) -> tuple[worker_pb2.MediaChunk, list[Start]]:
        """Returns the next part to send, and the starts that no longer wait once it is sent."""
        if len(self._turns) < MAX_AT_ONCE:
            key = next((key for key, upload in self._uploads.items() if not upload.sent), b"")
            if key:
                self._turns.appendleft(key)
        key = self._turns.popleft()
        upload = self._uploads[key]
        data, at = upload.file.data, upload.sent
        part = worker_pb2.MediaChunk(
            hash=key,
            size=len(data),
            offset=at,
            data=data[at : at + PART_BYTES],
            media_type="" if at else upload.file.media_type,
        )
        upload.sent += len(part.data)
        if upload.sent < len(data):
            self._turns.append(key)
            return part, []
        del self._uploads[key]
        self._pending -= len(data)
        self._on_sent(len(data), key in self._again)
        self._again.discard(key)
        self._remember(key)
        return part, list(self._ready(key))

    def _ready(self, key: bytes) -> Iterator[Start]:
        for slot, waiting in list(self._waiting.items()):
            waiting.missing.discard(key)
            if not waiting.missing:
                del self._waiting[slot]
                yield waiting.start

    def _remember(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forgets files that the worker no longer has."""
        for key in keys:
            if key in self._known:
                del self._known[key]
                self._again.add(key)
        if len(self._again) > MAX_KNOWN:
            self._again.clear()

    def clear(self) -> None:
        """Forgets everything: the session has ended."""
        self._known.clear()
        self._again.clear()
        self._uploads.clear()
        self._turns.clear()
        self._waiting.clear()
        self._pending = 0


def read_hashes(packed: bytes) -> list[bytes]:
    """Returns the hashes of `TokenBatch.dropped_media`; what follows the last whole one is ignored."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed) - HASH_BYTES + 1, HASH_BYTES)]
