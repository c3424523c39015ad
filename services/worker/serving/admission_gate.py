"""Admission of requests to a worker: closed before its start, while it is suspended, and once it shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.common.base.errors import ErrorKind, SluiceError, overloaded
from services.worker.serving.status import WorkerStatus


class AdmissionGate:
    """Rejects requests by raising.

    Args:
        status: updated when the worker is suspended or resumed.
        max_live: limit of concurrent requests and calls; 0: no limit.

    Attributes:
        on_serving: called with the reason when the worker stops serving temporarily, and with "" when it serves again.
        idle: set while no request or call is running.
    """

    def __init__(self, status: WorkerStatus, max_live: int) -> None:
        self._status = status
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
        """Starts to accept requests."""
        self._closed = None
        self._status.leave()

    def close(self, error: SluiceError) -> None:
        """Rejects all further requests with `error`, permanently."""
        self._closed = error

    def suspend(self, why: str, error: SluiceError) -> bool:
        """Rejects new requests with `error` until `resume`; running requests continue.

        Returns:
            False when the worker was already suspended for this reason.
        """
        newly_suspended = why not in self._suspended
        self._suspended[why] = error
        self._status.enter(why)
        self.on_serving(why)
        return newly_suspended

    def resume(self, why: str) -> None:
        """Removes one reason; the worker serves again once no reason is left."""
        if self._suspended.pop(why, None) is None:
            return
        remaining = next(iter(self._suspended), "")
        if remaining:
            self._status.enter(remaining)
        else:
            self._status.leave()
            self.on_serving("")

    @property
    def refusal(self) -> SluiceError | None:
        """The error that new requests receive; None while they are accepted."""
        return self._closed or next(iter(self._suspended.values()), None)

    def check(self) -> None:
        """Raises SluiceError while requests are not accepted, or when the limit is reached."""
        if error := self.refusal:
            raise error.with_traceback(None)  # shared instance: its traceback would retain the frames of every caller
        running = self._requests + self._calls
        if self._max_live and running >= self._max_live:
            raise overloaded(f"This worker already runs {running} requests, its limit; try another worker or later.")

    def count(self, requests: int) -> None:
        """Sets the number of running requests."""
        self._requests = requests
        self._update_idle()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a call that is not a generation as a running request, for limit and drain; raises as `check` does."""
        self.check()
        self._calls += 1
        self._update_idle()
        try:
            yield
        finally:
            self._calls -= 1
            self._update_idle()

    def _update_idle(self) -> None:
        if self._requests or self._calls:
            self.idle.clear()
        else:
            self.idle.set()
