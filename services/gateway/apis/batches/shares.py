"""Shares of what the batches of all tenants use: each tenant gets one at once, the rest goes to who has least."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairShares:
    """Divides an amount between tenants.

    A tenant that holds nothing never waits, so that no other tenant can delay its first share, however long it holds
    its own. So the sum exceeds the limit by at most one share of each tenant.

    Args:
        limit: of all shares together, apart from a tenant's only one.

    Attributes:
        used: sum of all shares.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self.used = 0

    @asynccontextmanager
    async def taken(self, owner: str, amount: int = 1) -> AsyncIterator[None]:
        """Waits for a share and holds it."""
        await self._take(owner, amount)
        try:
            yield
        finally:
            self._give_back(owner, amount)

    async def _take(self, owner: str, amount: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._waiting.setdefault(owner, deque()).append(entry)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(owner, amount)
            elif (waiting := self._waiting.get(owner)) and entry in waiting:
                waiting.remove(entry)
                self._forget(owner)
                self._grant()
            raise

    def _give_back(self, owner: str, amount: int) -> None:
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]
        self.used -= amount
        self._grant()

    def _grant(self) -> None:
        """Gives shares to those that hold least while they fit."""
        while self._waiting:
            owner = min(self._waiting, key=lambda name: self._held.get(name, 0))
            amount, turn = self._waiting[owner][0]
            if owner in self._held and self.used + amount > self._limit:
                return
            self._waiting[owner].popleft()
            self._forget(owner)
            if turn.done():
                continue
            self._held[owner] = self._held.get(owner, 0) + amount
            self.used += amount
            turn.set_result(None)

    def _forget(self, owner: str) -> None:
        waiting = self._waiting.pop(owner)
        if waiting:
            self._waiting[owner] = waiting  # behind the others
