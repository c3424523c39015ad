"""Whether a worker takes requests: not before its start, not while something keeps it from serving, not at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.common.errors import ErrorKind, SluiceError, overloaded
from services.worker.serving.status import WorkerStatus


class AdmissionGate:
    """Says no by raising.

    Args:
        phases: says what keeps the worker from serving.
        max_live: requests and calls alive at once; 0: no limit.

    Attributes:
        on_serving: called when the worker stops serving for a while, with why, and with "" when it serves again.
        idle: set while nothing is alive.
    """

    def __init__(self, phases: WorkerStatus, max_live: int) -> None:
        self._phases = phases
        self._max_live = max_live
        self._closed: SluiceError | None = SluiceError(
            ErrorKind.UNAVAILABLE, "The worker is still starting.", code="worker_starting", retry_after_ms=1000
        )
        self._suspended: dict[str, SluiceError] = {}
        self._requests = self._calls = 0
        self.on_serving: Callable[[str], None] = lambda why: None
        self.idle = asyncio.Event()
        self.idle.set()

    def open(self) -> None:
        """Requests are welcome."""
        self._closed = None
        self._phases.leave()

    def close(self, error: SluiceError) -> None:
        """From now on requests are refused, for good."""
        self._closed = error

    def suspend(self, why: str, error: SluiceError) -> bool:
        """Refuses requests with `error`, out of discovery, until `resume`; live ones go on. False: it did already."""
        fresh = why not in self._suspended
        self._suspended[why] = error
        self._phases.enter(why)
        self.on_serving(why)
        return fresh

    def resume(self, why: str) -> None:
        """The reason is gone; the worker serves when no other is left."""
        if self._suspended.pop(why, None) is None:
            return
        left = next(iter(self._suspended), "")
        if left:
            self._phases.enter(left)
        else:
            self._phases.leave()
            self.on_serving("")

    @property
    def refusal(self) -> SluiceError | None:
        """Why requests are not welcome; None: they are."""
        return self._closed or next(iter(self._suspended.values()), None)

    def check(self) -> None:
        """Raises SluiceError while requests are not welcome, or there are too many."""
        if error := self.refusal:
            raise error.with_traceback(None)  # it is raised again and again, and would keep every call that heard it
        alive = self._requests + self._calls
        if self._max_live and alive >= self._max_live:
            raise overloaded(f"{alive} requests are alive on this worker, and it takes no more.")

    def count(self, requests: int) -> None:
        """So many requests are alive now."""
        self._requests = requests
        self._note_idle()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A call that is no generation counts like a live request, for limit and drain; raises as `check`."""
        self.check()
        self._calls += 1
        self._note_idle()
        try:
            yield
        finally:
            self._calls -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if self._requests or self._calls:
            self.idle.clear()
        else:
            self.idle.set()
