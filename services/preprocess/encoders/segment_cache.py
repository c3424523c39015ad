"""Remembers the ids of text segments, which conversations repeat turn after turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from threading import Lock

from services.preprocess.encoders.backend import Backend

ENTRY_OVERHEAD = 200
"""Bytes that an entry takes beside its text and its ids, as measured; rather too many than too few."""


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds and has done so far; all but `entries` in bytes.

    Attributes:
        held: memory in use.
        limit: most memory that may be in use.
        entries: segments remembered.
        hit: text whose ids were remembered.
        missed: text that was encoded.
    """

    held: int
    limit: int
    entries: int
    hit: int
    missed: int


class SegmentCache(Backend):
    """A backend that encodes only what it does not remember. The least recently used is forgotten first.

    Exact where the backend is: it gives each text's ids by themselves, whatever stands beside it.

    Args:
        backend: encodes.
        max_bytes: bound of the memory held, texts and ids and what it takes to find them.
    """

    def __init__(self, backend: Backend, max_bytes: int) -> None:
        self.name = backend.name
        self._backend = backend
        self._max_bytes = max_bytes
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        self._held = self._hit = self._missed = 0
        self._lock = Lock()

    @property
    def stats(self) -> CacheStats:
        """What it holds and has done so far."""
        with self._lock:
            return CacheStats(self._held, self._max_bytes, len(self._ids), self._hit, self._missed)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """See Backend."""
        found = self._remembered(texts)
        missing = [index for index, ids in enumerate(found) if ids is None]
        if missing:
            made = self._backend.encode([texts[index] for index in missing])
            for index, ids in zip(missing, made, strict=True):
                found[index] = ids
            self._remember([(texts[index], ids) for index, ids in zip(missing, made, strict=True)])
        return [ids for ids in found if ids is not None]

    def _remembered(self, texts: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._lock:
            for text in texts:
                ids = self._ids.get(text)
                found.append(ids)
                if ids is None:
                    self._missed += len(text)
                else:
                    self._ids.move_to_end(text)
                    self._hit += len(text)
        return found

    def _remember(self, made: Sequence[tuple[str, bytes]]) -> None:
        with self._lock:
            for text, ids in made:
                size = _size(text, ids)
                # One that would push out most of the others is not worth them.
                if text in self._ids or size > self._max_bytes // 4:
                    continue
                self._ids[text] = ids
                self._held += size
            while self._held > self._max_bytes:
                self._held -= _size(*self._ids.popitem(last=False))


def _size(text: str, ids: bytes) -> int:
    return getsizeof(text) + getsizeof(ids) + ENTRY_OVERHEAD
