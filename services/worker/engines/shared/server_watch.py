"""Notices that the server of an engine has exited, or has stopped without closing its connections."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.common.base.errors import ENGINE_UNHEALTHY, ErrorKind, SluiceError

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""Maximum seconds of a probe of an engine's server, unless its engine says otherwise; at most half of silent_s."""
_UNHEARD = frozenset({ErrorKind.RESPONSE_TIMEOUT, ErrorKind.ENGINE_SHUTDOWN, ErrorKind.CANNOT_CONNECT})
"""Errors of a probe that the server did not answer."""
LIFE_CHECKS, LIFE_CHECK_INTERVAL_S = 10, 0.1

T = TypeVar("T")


class ServerWatch:
    """The life of an engine's server, known from what it sends and from probes.

    A server that has sent nothing and answered no probe for `silent_s` has stopped: what waits for it fails, and new
    generations are refused, until it answers again. One whose probes fail several times in a row has exited.

    Args:
        silent_s: seconds of silence after which the server counts as stopped.
        interval_s: seconds between two probes.
        max_failures: probes that may fail in a row.
        fails: whether an error of a probe is a failure; by default each but that of a late answer, as the canary
            handles a slow server.
        probe_s: maximum seconds of a probe; at most half of `silent_s`.
    """

    def __init__(
        self,
        silent_s: float,
        interval_s: float,
        max_failures: int,
        fails: Callable[[SluiceError], bool] = lambda error: error.kind is not ErrorKind.RESPONSE_TIMEOUT,
        probe_s: float = PROBE_S,
    ) -> None:
        self._silent_s = silent_s
        self._interval_s = interval_s
        self._max_failures = max_failures
        self._fails = fails
        self._probe_s = min(probe_s, silent_s / 2)
        self._heard_at = time.monotonic()
        self._stopped = False
        self._waits: set[asyncio.Timeout] = set()

    def check(self) -> None:
        """Raises SluiceError(ENGINE_SHUTDOWN) while the server counts as stopped."""
        if self._stopped:
            raise _stopped()

    async def wait(self, answer: Awaitable[T]) -> T:
        """Returns an answer of the server, where None means its end.

        Raises:
            SluiceError: ENGINE_SHUTDOWN once the server counts as stopped.
        """
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                answered = await answer
        except TimeoutError:
            if not wait.expired():
                raise
            raise _stopped() from None
        finally:
            self._waits.discard(wait)
        if answered is not None:
            self._hear()
        return answered

    async def run(self, probe: Callable[[], Awaitable[object]], report: Callable[[], Awaitable[None]]) -> None:
        """Probes the server until it has exited.

        Args:
            probe: asks what a server answers at once; raises SluiceError when it fails, and returns False when the
                server answers that its engine has exited.
            report: called after each probe, with what remains of its time; its errors count like those of a probe.

        Raises:
            SluiceError: ENGINE_SHUTDOWN, at the end.
        """
        self._heard_at = time.monotonic()  # its start may have taken minutes
        failures = 0
        while failures < self._max_failures:
            await asyncio.sleep(self._interval_s)
            try:
                async with asyncio.timeout(self._probe_s):
                    if await probe() is False:
                        break
                    self._hear()
                    await report()
                failures = 0
            except TimeoutError:
                self._check_silence()
            except SluiceError as error:
                failures += self._fails(error)
                if error.kind not in _UNHEARD:
                    self._hear()
                self._check_silence()
        raise server_exited()

    async def survived(self, probe: Callable[[], Awaitable[object]]) -> bool:
        """Returns whether the server still runs after a failed generation.

        It is probed repeatedly, because a server whose engine has exited stays healthy a moment longer.
        """
        for _ in range(LIFE_CHECKS):
            try:
                async with asyncio.timeout(PROBE_S):
                    if await probe() is False:
                        return False
            except (SluiceError, TimeoutError):
                return False
            await asyncio.sleep(LIFE_CHECK_INTERVAL_S)
        return True

    def _hear(self) -> None:
        self._heard_at, self._stopped = time.monotonic(), False

    def _check_silence(self) -> None:
        """Ends all waits for a server that has sent nothing for too long."""
        silent_s = time.monotonic() - self._heard_at
        if silent_s < self._silent_s:
            return
        if not self._stopped:
            extra = {"silent_s": round(silent_s), "generations": len(self._waits)}
            log.warning("the engine's server neither answers nor generates; its generations fail", extra=extra)
        self._stopped = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)


def server_exited() -> SluiceError:
    """Returns the error of what a server that has exited was to answer."""
    return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine's server has exited; retry on another worker.")


def _stopped() -> SluiceError:
    return SluiceError(
        ErrorKind.ENGINE_SHUTDOWN,
        "The engine's server has stopped responding; retry on another worker.",
        code=ENGINE_UNHEALTHY,
    )
