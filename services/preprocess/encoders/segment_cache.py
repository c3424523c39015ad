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
        cached = self._look_up(texts)
        missing = [index for index, ids in enumerate(cached) if ids is None]
        if missing:
            encoded = self._backend.encode([texts[index] for index in missing])
            for index, ids in zip(missing, encoded, strict=True):
                cached[index] = ids
            self._store([(texts[index], ids) for index, ids in zip(missing, encoded, strict=True)])
        return [ids for ids in cached if ids is not None]

    def _look_up(self, texts: Sequence[str]) -> list[bytes | None]:
        cached: list[bytes | None] = []
        with self._lock:
            for text in texts:
                ids = self._ids.get(text)
                cached.append(ids)
                if ids is None:
                    self._missed += len(text)
                else:
                    self._ids.move_to_end(text)
                    self._hit += len(text)
        return cached

    def _store(self, encoded: Sequence[tuple[str, bytes]]) -> None:
        with self._lock:
            for text, ids in encoded:
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
