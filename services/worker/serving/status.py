"""The phase of a worker that is not serving, such as "loading weights", for logs, health checks and the terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0


def silent(name: str, share: float | None) -> None:
    """Ignores the change."""


on_change: Callable[[str, float | None], None] = silent
"""Called with every phase and its progress; the CLI sets it to show them on the terminal."""


class WorkerStatus:
    """Holds the current phase.

    Attributes:
        name: such as "loading weights", "asleep" or "unhealthy"; empty while serving.
        share: progress from 0 to 1; None: unknown.
        warning: a problem while serving, such as "worker id taken"; empty: none.
    """

    def __init__(self) -> None:
        self.name = "starting"
        self.share: float | None = None
        self.warning = ""
        self._since_s = time.monotonic()
        self._logged_s = 0.0

    def enter(self, name: str, share: float | None = None) -> None:
        """Sets the phase; logs it when it changes, and its progress every `LOG_INTERVAL_S`."""
        now = time.monotonic()
        changed = name != self.name
        if changed:
            self._since_s = now
        self.name, self.share = name, None if share is None else min(max(share, 0.0), 1.0)
        on_change(name, self.share)
        if changed or now - self._logged_s > LOG_INTERVAL_S:
            self._logged_s = now
            log.info("%s", name, extra={} if self.share is None else {"percent": round(100 * self.share)})

    @property
    def seconds(self) -> float:
        """Duration of the current phase."""
        return time.monotonic() - self._since_s

    def leave(self) -> None:
        """Ends the phase; the worker serves."""
        self.name, self.share = "", None
        on_change("", None)
