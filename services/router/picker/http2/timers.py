"""The times of a connection: its handshake, its silences, its age and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HANDSHAKE_S = 10.0
KEEPALIVE_S = 20.0
KEEPALIVE_TIMEOUT_S = 5.0
LAST_STREAMS_S = 1.0
"""From the announcement that a connection ends until new streams on it are refused."""


class ConnectionTimers:
    """Runs the timers of one connection until `close`.

    Args:
        abort: ends the connection: its peer is silent.
        ping: sends a PING.

    Attributes:
        heard: whether anything has arrived since the last check.
    """

    def __init__(self, abort: Callable[[], None], ping: Callable[[], None]) -> None:
        self._abort = abort
        self._ping = ping
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.heard = True

    def start(self, age_s: float, on_age: Callable[[], None]) -> None:
        """Starts with a new connection.

        Args:
            age_s: when `on_age` is called; 0: never.
        """
        self._set("handshake", HANDSHAKE_S, self._abort)
        self._set("keepalive", KEEPALIVE_S, self._check)
        if age_s:
            self._set("age", age_s, on_age)

    def greeted(self) -> None:
        """Ends the handshake."""
        self._timers.pop("handshake").cancel()

    def last_streams(self, refuse_more: Callable[[], None]) -> bool:
        """Calls back once the peer has had time to learn that the connection ends; returns False if that is under way.

        Its streams may cross the announcement on their way.
        """
        if "last" in self._timers:
            return False
        self._set("last", LAST_STREAMS_S, refuse_more)
        return True

    def close(self) -> None:
        """Cancels all timers."""
        for timer in self._timers.values():
            timer.cancel()

    def _set(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        self._timers[name] = self._loop.call_later(seconds, callback)

    def _check(self) -> None:
        if self.heard:
            self.heard = False
            self._set("keepalive", KEEPALIVE_S, self._check)
        else:
            self._ping()
            self._set("keepalive", KEEPALIVE_TIMEOUT_S, self._check_answered)

    def _check_answered(self) -> None:
        if self.heard:
            self._check()
        else:
            self._abort()
