"""Event streams on which nothing moves: silent ones get a comment, blocked ones are cut in the end."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Protocol


class Watched(Protocol):
    """An event stream."""

    @property
    def blocked(self) -> bool: ...

    def reassure(self) -> None: ...

    def cut(self) -> None: ...


class KeepaliveMonitor:
    """Looks at all streams together, so that none needs a timer of its own.

    Args:
        comment_every_s: longest silence of a stream; 0: any.
        write_timeout_s: longest that a client may take nothing of what waits for it.
    """

    def __init__(self, comment_every_s: float = 15.0, write_timeout_s: float = 60.0) -> None:
        self._comment_every_s = comment_every_s
        self._write_timeout_s = write_timeout_s
        self._look_every_s = min(comment_every_s / 2 or write_timeout_s / 4, write_timeout_s / 4)
        self._streams: dict[Watched, float] = {}  # since when it is blocked; 0: it is not
        self._next: asyncio.TimerHandle | None = None
        self._reassured_at = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Watched) -> None:
        """From now on; a stream that says nothing for `comment_every_s` gets a comment."""
        self._streams[stream] = 0.0
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._look_every_s, self._look)

    def discard(self, stream: Watched) -> None:
        """A stream is over."""
        self._streams.pop(stream, None)

    def _look(self) -> None:
        self._next = None
        if not self._streams:
            return
        now = monotonic()
        reassuring = self._comment_every_s > 0 and now - self._reassured_at >= self._comment_every_s / 2.01
        if reassuring:
            self._reassured_at = now
        for stream, since in list(self._streams.items()):
            if not stream.blocked:
                self._streams[stream] = 0.0
                if reassuring:
                    stream.reassure()
            elif not since:
                self._streams[stream] = now
            elif now - since >= self._write_timeout_s:
                stream.cut()
        self._next = asyncio.get_running_loop().call_later(self._look_every_s, self._look)
