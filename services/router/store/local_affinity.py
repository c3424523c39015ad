"""Session affinity in the memory of one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from services.router.workers.worker import WorkerRank

MOST_PINS = 100_000  # beyond it, the least recently used sessions are dropped


class LocalSessionAffinity:
    """Maps sessions to the ranks of their last requests, each for its time to live.

    Args:
        now_ms: returns milliseconds of any clock.
    """

    def __init__(self, now_ms: Callable[[], int], most: int = MOST_PINS) -> None:
        self._now_ms = now_ms
        self._most = most
        self._pins: OrderedDict[str, tuple[WorkerRank, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, session_id: str) -> WorkerRank | None:
        """Returns the rank of a session; None if it is unknown or expired."""
        slot, until = self._pins.get(session_id, (None, 0))
        if slot is not None and until <= self._now_ms():
            del self._pins[session_id]
            return None
        return slot

    def put(self, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        """Sets the rank of a session."""
        self._pins[session_id] = (slot, self._now_ms() + ttl_ms)
        self._pins.move_to_end(session_id)
        if len(self._pins) > self._most:
            self._pins.popitem(last=False)
