"""The media files that a worker keeps: bounded, by least recent use, shared by all sessions."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from services.common.base.errors import ErrorKind, SluiceError, overloaded
from services.common.types.media.spans import MediaFile
from services.worker.metrics import MediaMetrics

OnDrop = Callable[[bytes], None]
"""Called with the hash of a file that is no longer kept."""


class MediaStore:
    """Keeps files by content hash, whose files have been checked before.

    Files of running requests are pinned: they are never dropped. Space is reserved before a file is received, so that
    kept files and unfinished uploads together stay within the limit.

    Args:
        limit: most bytes of files and reservations.
    """

    def __init__(self, limit: int, metrics: MediaMetrics | None = None) -> None:
        self.limit = limit
        self.used = 0
        self._kept = self._pinned = 0  # bytes of files
        self._metrics = metrics or MediaMetrics()
        self._metrics.watch(lambda: self.used)
        self._files: OrderedDict[bytes, MediaFile] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self._senders: dict[bytes, set[OnDrop]] = {}

    def __contains__(self, content: bytes) -> bool:
        return content in self._files

    def find(self, content: bytes) -> MediaFile | None:
        """Returns a file, which counts as a use of it; None if it is not kept."""
        file = self._files.get(content)
        if file is not None:
            self._files.move_to_end(content)
        return file

    def reserve(self, size: int) -> None:
        """Makes room for a file, dropping the least recently used ones.

        Raises:
            SluiceError: OVERLOADED when the files in use and the uploads leave too little room.
        """
        if self.used - self._kept + self._pinned + size > self.limit:
            raise overloaded(
                f"The worker's media files in use leave no room for another of {size} bytes; try again later, or raise "
                "--media-cache-mb.",
            )
        while self.used + size > self.limit:
            self._drop(next(content for content in self._files if content not in self._pins))
        self.used += size

    def release(self, size: int) -> None:
        """Gives up a reservation."""
        self.used -= size

    def add(self, file: MediaFile) -> None:
        """Keeps a checked file, for which its size has been reserved."""
        if file.hash in self._files:
            self.release(len(file.data))
            self._files.move_to_end(file.hash)
        else:
            self._files[file.hash] = file
            self._kept += len(file.data)
        self._metrics.record("stored")

    def add_sender(self, content: bytes, on_drop: OnDrop) -> None:
        """Calls `on_drop` once when a kept file is dropped."""
        self._senders.setdefault(content, set()).add(on_drop)

    def forget_sender(self, contents: Iterable[bytes], on_drop: OnDrop) -> None:
        """Ends `add_sender` for these files."""
        for content in contents:
            if senders := self._senders.get(content):
                senders.discard(on_drop)
                if not senders:
                    del self._senders[content]

    def pin(self, contents: Iterable[bytes]) -> None:
        """Keeps files until `unpin` has been called as often."""
        for content in contents:
            self._pins[content] += 1
            if self._pins[content] == 1:
                self._pinned += len(self._files[content].data)

    def unpin(self, contents: Iterable[bytes]) -> None:
        """Undoes `pin`."""
        for content in contents:
            self._pins[content] -= 1
            if not self._pins[content]:
                del self._pins[content]
                self._pinned -= len(self._files[content].data)

    def record(self, outcome: str) -> None:
        """Counts a file that is not kept."""
        self._metrics.record(outcome)

    def record_missing(self) -> None:
        """Counts a request whose file is not kept."""
        self._metrics.record_missing()

    def _drop(self, content: bytes) -> None:
        size = len(self._files.pop(content).data)
        self.used -= size
        self._kept -= size
        self._metrics.record("dropped")
        for on_drop in self._senders.pop(content, ()):
            on_drop(content)


def missing(content: bytes) -> SluiceError:
    """Returns the error of a start whose file is not kept."""
    return SluiceError(
        ErrorKind.UNAVAILABLE,
        f"The worker does not have the media file {content.hex()}; send it, then start again.",
        param="media",
        code="media_missing",
        retryable=True,
    )
