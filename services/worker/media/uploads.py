"""Media files that one session sends in parts, checked before they are kept."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid
from services.common.types.media.spans import HASH_BYTES, MediaFile, MediaSpan
from services.worker.contract.generation import MediaItem
from services.worker.media.store import MediaStore, OnDrop, missing

log = logging.getLogger(__name__)

PART_BYTES = 256 << 10
MAX_UPLOADS = 64
"""Unfinished uploads of a session; one more is refused with INVALID_ARGUMENT, `malformed_media`."""
MAX_FAILED = 256
"""Failed uploads of a session that are remembered; the oldest is forgotten."""
STALE_S = 60.0  # an unfinished upload without a part for this long makes way for others


@dataclass(slots=True)
class _Upload:
    size: int
    media_type: str
    at_s: float
    data: bytearray = field(default_factory=bytearray)
    digest: Any = field(default_factory=sha256)


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A part of a media file: the file's content hash and size, and the offset of the part."""

    hash: bytes
    size: int
    offset: int
    data: bytes
    media_type: str = ""


class IncomingMedia:
    """Receives the files of one session, and names those that the worker has dropped since.

    A faulty upload is discarded; the requests that need its file then fail with the reason. The hash is computed part
    by part, so that a large file delays the event loop no longer than one part does.

    Args:
        most_bytes: of one file.
        on_drop: called with the hash of a file that this session has sent and that the worker no longer keeps.
    """

    def __init__(
        self,
        store: MediaStore,
        most_bytes: int,
        on_drop: OnDrop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._most_bytes = most_bytes
        self._on_drop = on_drop
        self._clock = clock
        self._uploads: dict[bytes, _Upload] = {}
        self._sent: set[bytes] = set()
        self._failed: OrderedDict[bytes, SluiceError] = OrderedDict()

    def receive(self, part: MediaPart) -> None:
        """Adds a part; an error concerns only requests that need its file."""
        try:
            self._add(part)
        except Exception as error:
            if not isinstance(error, SluiceError):
                log.exception("failed to receive a media file")
                error = internal("The worker failed to receive a media file; see its log.")
            self._discard(part.hash)
            self._store.record("refused")
            self._failed[part.hash[:HASH_BYTES]] = error
            if len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)

    def items(self, spans: Sequence[MediaSpan]) -> tuple[MediaItem, ...]:
        """Returns the items of a prompt, with their files.

        Raises:
            SluiceError: why a file was not accepted; or that it is not kept, with the code "media_missing".
        """
        return tuple(MediaItem(span, self._file(span.hash)) for span in spans)

    def close(self) -> None:
        """Discards unfinished uploads; kept files remain for other sessions."""
        for content in tuple(self._uploads):
            self._discard(content)
        self._store.forget_sender(self._sent, self._dropped)
        self._sent.clear()

    def _file(self, content: bytes) -> MediaFile:
        file = self._store.find(content)
        if file is None:
            self._store.record_missing()
            raise self._failed.pop(content, None) or missing(content)
        return file

    def _add(self, part: MediaPart) -> None:
        if len(part.hash) != HASH_BYTES:
            raise _malformed(f"has a hash of {len(part.hash)} bytes; send {HASH_BYTES}")
        if part.hash in self._store:
            self._discard(part.hash)
            self._keep(part.hash)
            if not part.offset:
                self._store.record("known")
            return
        if len(part.data) > PART_BYTES or not part.data:
            raise _malformed(f"has a part of {len(part.data)} bytes; send 1 to {PART_BYTES}")
        upload = self._uploads.get(part.hash)
        if upload is None or not part.offset:
            upload = self._begin(part)
        if part.offset != len(upload.data) or part.size != upload.size:
            raise _malformed(
                f"continues at byte {part.offset} of {part.size}, expected {len(upload.data)} of {upload.size}"
            )
        if part.offset + len(part.data) > upload.size:
            raise _malformed(f"is longer than its size, {upload.size} bytes")
        upload.data += part.data
        upload.at_s = self._clock()
        upload.digest.update(part.data)
        if len(upload.data) == upload.size:
            self._finish(part.hash, upload)

    def _begin(self, part: MediaPart) -> _Upload:
        self._discard(part.hash)
        if part.offset:
            raise _malformed(f"begins at byte {part.offset}; send its parts in order, from 0")
        if not 0 < part.size <= self._most_bytes:
            raise SluiceError(
                ErrorKind.TOO_LARGE,
                f"A media file has {part.size} bytes; the worker takes 1 to {self._most_bytes}.",
                param="media",
                code="media_too_large",
            )
        self._discard_stale()
        if len(self._uploads) >= MAX_UPLOADS:
            raise _malformed(f"is one upload too many at the same time; finish some of {MAX_UPLOADS} first")
        self._store.reserve(part.size)
        upload = self._uploads[part.hash] = _Upload(part.size, part.media_type, self._clock())
        return upload

    def _finish(self, content: bytes, upload: _Upload) -> None:
        if upload.digest.digest()[:HASH_BYTES] != content:
            raise mismatch(content)
        del self._uploads[content]
        self._store.add(MediaFile(content, bytes(upload.data), upload.media_type))
        self._failed.pop(content, None)
        self._keep(content)

    def _keep(self, content: bytes) -> None:
        self._sent.add(content)
        self._store.add_sender(content, self._dropped)

    def _dropped(self, content: bytes) -> None:
        self._sent.discard(content)
        self._on_drop(content)

    def _discard(self, content: bytes) -> None:
        if (upload := self._uploads.pop(content, None)) is not None:
            self._store.release(upload.size)

    def _discard_stale(self) -> None:
        before_s = self._clock() - STALE_S
        for content in [content for content, upload in self._uploads.items() if upload.at_s < before_s]:
            self._discard(content)


def mismatch(content: bytes) -> SluiceError:
    """Returns the error of a file whose content does not have the hash under which it was sent."""
    return invalid(
        f"A media file does not have the content hash {content.hex()} under which it was sent; send it again.",
        param="media",
        code="media_mismatch",
    )


def _malformed(what: str) -> SluiceError:
    return invalid(f"A media file {what}.", param="media", code="malformed_media")
