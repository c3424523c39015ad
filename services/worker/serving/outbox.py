"""Pending output of a session: columns of token rows that accumulate while the previous message is being written."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from services.worker.contract.generation import Delta

if TYPE_CHECKING:
    from services.worker.contract.text_delta import TextUpdate

PAGE_TOKENS = 65_536  # keeps a message well below gRPC's size limit
STALLED_TOKENS = 1 << 20
STALLED_AFTER_S = 5.0
MAX_TOKENS = 8 << 20
"""Tokens that wait for a gateway that does not read; with more its session ends."""
_IDS = partial(array, "I")


@dataclass(slots=True)
class Page:
    """One message of a session.

    Attributes:
        slots: slot of each row.
        counts: tokens of each row.
        token_ids: tokens of all rows, concatenated.
        extras: deltas by slot, to be applied after the rows.
        texts: text produced from the tokens, by slot.
        dropped_media: hashes of media files that the worker no longer keeps, concatenated.
    """

    slots: array[int] = field(default_factory=_IDS)
    counts: array[int] = field(default_factory=_IDS)
    token_ids: array[int] = field(default_factory=_IDS)
    extras: list[tuple[int, Delta]] = field(default_factory=list)
    texts: dict[int, TextUpdate] = field(default_factory=dict)
    dropped_media: bytearray = field(default_factory=bytearray)


class Outbox:
    """Collects the output of all requests of a session.

    Bounds the memory that a caller which stops reading can occupy.

    Args:
        wake: called when there is something to send.
        on_overflow: called once, when `STALLED_TOKENS` are pending and nothing was taken for `STALLED_AFTER_S`
            seconds, or when `MAX_TOKENS` are pending.

    Attributes:
        page: where output is added.
        woken: whether `wake` was called since the last `take`.
    """

    def __init__(self, wake: Callable[[], None], on_overflow: Callable[[], None]) -> None:
        self.page = Page()
        self.woken = False
        self._wake = wake
        self._on_overflow = on_overflow
        self._full: deque[Page] = deque()
        self._taken_s = time.monotonic()
        self._overflowed = False
        self._flushed: asyncio.Event | None = None

    @property
    def pending_tokens(self) -> int:
        """Number of tokens waiting to be sent."""
        return len(self._full) * PAGE_TOKENS + len(self.page.token_ids)

    def ready(self) -> None:
        """Schedules sending; call it after every addition to `page`."""
        if len(self.page.token_ids) >= PAGE_TOKENS:
            self._start_page()
        if not self.woken:
            self.woken = True
            self._wake()

    def take(self) -> Page | None:
        """Returns the next message, or None.

        A call implies that everything taken before has been written.
        """
        self._taken_s = time.monotonic()
        self.woken = False
        if self._full:
            return self._full.popleft()
        page = self.page
        if not (page.slots or page.extras or page.texts or page.dropped_media):
            if self._flushed is not None:
                self._flushed.set()
            return None
        self.page = Page()
        return page

    async def flush(self) -> None:
        """Returns when everything has been written."""
        self._flushed = asyncio.Event()
        self._wake()
        await self._flushed.wait()

    def _start_page(self) -> None:
        self._full.append(self.page)
        self.page = Page()
        pending = self.pending_tokens
        stalled = pending >= STALLED_TOKENS and time.monotonic() - self._taken_s > STALLED_AFTER_S
        if (stalled or pending >= MAX_TOKENS) and not self._overflowed:
            self._overflowed = True
            self._on_overflow()
