"""What a session has to say and has not sent yet: columns that collect while the last message is being written."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.worker.contract.generation import Delta

if TYPE_CHECKING:
    from services.worker.generation.text_delta import TextDelta

PAGE_TOKENS = 65_536  # keeps a message well under the size limit
STALLED_TOKENS = 1 << 20
STALLED_AFTER_S = 5.0
MOST_TOKENS = 8 << 20


@dataclass(slots=True)
class Page:
    """One message: row i is slots[i] with the next counts[i] of token_ids; extras come after the rows, then what
    became of the tokens, by slot."""

    slots: array[int] = field(default_factory=lambda: array("I"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    extras: list[tuple[int, Delta]] = field(default_factory=list)
    texts: dict[int, TextDelta] = field(default_factory=dict)


class Outbox:
    """Collects rows of all the session's requests.

    A peer that stops reading must not fill our memory: with a million tokens pending and nothing taken for five
    seconds, or eight million whatever the reason, `on_overflow` is called once.

    Args:
        wake: called when there is something to send.
    """

    def __init__(self, wake: Callable[[], None], on_overflow: Callable[[], None]) -> None:
        self.page = Page()
        self._wake = wake
        self._on_overflow = on_overflow
        self._full: deque[Page] = deque()
        self._taken_s = time.monotonic()
        self._overflown = False
        self._sent: asyncio.Event | None = None

    @property
    def empty(self) -> bool:
        """Nothing waits to be sent."""
        return not (self._full or self.page.slots or self.page.extras or self.page.texts)

    @property
    def pending_tokens(self) -> int:
        """Tokens that wait to be sent."""
        return len(self._full) * PAGE_TOKENS + len(self.page.token_ids)

    def ready(self) -> None:
        """Rows or extras were added to `page`."""
        if len(self.page.token_ids) >= PAGE_TOKENS:
            self._turn_page()
        self._wake()

    def take(self) -> Page | None:
        """The next message; None when there is none and everything taken before was written."""
        self._taken_s = time.monotonic()
        if self._full:
            return self._full.popleft()
        if self.empty:
            if self._sent is not None:
                self._sent.set()
            return None
        page, self.page = self.page, Page()
        return page

    async def flush(self) -> None:
        """Returns when everything was written."""
        self._sent = asyncio.Event()
        self._wake()
        await self._sent.wait()

    def _turn_page(self) -> None:
        self._full.append(self.page)
        self.page = Page()
        pending = self.pending_tokens
        stalled = pending >= STALLED_TOKENS and time.monotonic() - self._taken_s > STALLED_AFTER_S
        if (stalled or pending >= MOST_TOKENS) and not self._overflown:
            self._overflown = True
            self._on_overflow()
