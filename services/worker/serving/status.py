"""What keeps a worker from serving, in words: on the log, and for whoever asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

SAY_AGAIN_S = 5.0


def silent(name: str, share: float | None) -> None:
    """Nobody looks."""


on_change: Callable[[str, float | None], None] = silent
"""Called with every phase of this process's worker and its progress; for a terminal."""


class WorkerStatus:
    """The phase now.

    Attributes:
        name: such as "loading weights", "asleep", "unhealthy"; empty: it serves.
        share: how far it is, 0 to 1; None: unknown.
        aside: what is wrong although it serves, such as "worker id taken"; empty: nothing.
    """

    def __init__(self) -> None:
        self.name = "starting"
        self.share: float | None = None
        self.aside = ""
        self._since_s = time.monotonic()
        self._said_s = 0.0

    def enter(self, name: str, share: float | None = None) -> None:
        """Fits `LLMEngine.on_phase`; says a phase once, and its progress every few seconds."""
        now = time.monotonic()
        fresh = name != self.name
        if fresh:
            self._since_s = now
        self.name, self.share = name, None if share is None else min(max(share, 0.0), 1.0)
        on_change(name, self.share)
        if fresh or now - self._said_s > SAY_AGAIN_S:
            self._said_s = now
            log.info("%s", name, extra={} if self.share is None else {"percent": round(100 * self.share)})

    @property
    def seconds(self) -> float:
        """How long the phase has lasted."""
        return time.monotonic() - self._since_s

    def leave(self) -> None:
        """It serves."""
        self.name, self.share = "", None
        on_change("", None)
