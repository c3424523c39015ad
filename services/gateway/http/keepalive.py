"""Sends keep-alive comments on idle event streams and disconnects clients that do not read."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Protocol

from services.common.base.shared_steps import shared_step

log = logging.getLogger(__name__)


class MonitoredStream(Protocol):
    """An event stream."""

    @property
    def blocked(self) -> bool: ...

    def keep_alive(self) -> None: ...

    def cut(self) -> None: ...


class KeepaliveMonitor:
    """Checks all streams with one timer.

    Args:
        comment_every_s: longest time without output on a stream; 0 for no limit.
        write_timeout_s: longest time that a client may read nothing while data is pending.
    """

    def __init__(self, comment_every_s: float = 15.0, write_timeout_s: float = 60.0) -> None:
        self._comment_every_s = comment_every_s
        self._write_timeout_s = write_timeout_s
        self._interval_s = min(comment_every_s / 2 or write_timeout_s / 4, write_timeout_s / 4)
        self._streams: dict[MonitoredStream, float] = {}  # start of the current block, 0 if not blocked
        self._next: asyncio.TimerHandle | None = None
        self._comments_sent_at = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: MonitoredStream) -> None:
        """Starts monitoring a stream."""
        self._streams[stream] = 0.0
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    def discard(self, stream: MonitoredStream) -> None:
        """Stops monitoring a stream."""
        self._streams.pop(stream, None)

    @shared_step("gateway.keep_alive")
    def _check(self) -> None:
        self._next = None
        if not self._streams:
            return
        now = monotonic()
        send_comments = self._comment_every_s > 0 and now - self._comments_sent_at >= self._comment_every_s / 2.01
        if send_comments:
            self._comments_sent_at = now
        for stream, since in list(self._streams.items()):
            try:
                self._check_one(stream, since, now, send_comments)
            except Exception:  # the timer also serves the other streams
                log.exception("monitoring an event stream failed; its client is disconnected")
                stream.cut()
        self._next = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    def _check_one(self, stream: MonitoredStream, since: float, now: float, send_comment: bool) -> None:
        if not stream.blocked:
            self._streams[stream] = 0.0
            if send_comment:
                stream.keep_alive()
        elif not since:
            self._streams[stream] = now
        elif now - since >= self._write_timeout_s:
            stream.cut()
