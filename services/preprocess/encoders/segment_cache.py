"""Caches the ids of text segments, which conversations repeat in every turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof
from threading import Lock

from services.preprocess.contract.tokenizer import CacheStats
from services.preprocess.encoders.backend import Backend

ENTRY_OVERHEAD = 200
"""Bytes per entry beyond its text and ids, measured and rounded up."""


class SegmentCache(Backend):
    """A backend that encodes only segments not in its LRU cache.

    Exact if the backend is: each text's ids are independent of the other texts.

    Args:
        backend: encodes missing segments.
        max_bytes: maximum memory for texts, ids and overhead.
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
        """The current statistics."""
        with self._lock:
            return CacheStats(self._held, self._max_bytes, len(self._ids), self._hit, self._missed)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        cached, missing = self._look_up(texts)
        if missing:
            encoded = self._backend.encode([texts[index] for index in missing])
            for index, ids in zip(missing, encoded, strict=True):
                cached[index] = ids
            self._store(texts, missing, encoded)
        return cached

    def _look_up(self, texts: Sequence[str]) -> tuple[list[bytes], list[int]]:
        """Returns the ids of each text, empty for one that is not cached, and the indices of these."""
        cached: list[bytes] = []
        missing: list[int] = []
        with self._lock:
            for index, text in enumerate(texts):
                ids = self._ids.get(text)
                if ids is None:
                    missing.append(index)
                    cached.append(b"")
                    self._missed += len(text)
                else:
                    cached.append(ids)
                    self._ids.move_to_end(text)
                    self._hit += len(text)
        return cached, missing

    def _store(self, texts: Sequence[str], indices: Sequence[int], encoded: Sequence[bytes]) -> None:
        with self._lock:
            for index, ids in zip(indices, encoded, strict=True):
                text = texts[index]
                size = _size(text, ids)
                # Do not evict most entries for a single large one.
                if text in self._ids or size > self._max_bytes // 4:
                    continue
                self._ids[text] = ids
                self._held += size
            while self._held > self._max_bytes:
                self._held -= _size(*self._ids.popitem(last=False))


def _size(text: str, ids: bytes) -> int:
    return getsizeof(text) + getsizeof(ids) + ENTRY_OVERHEAD
