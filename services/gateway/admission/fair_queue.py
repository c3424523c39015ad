"""The line in front of a gateway that is full: bounded, with a deadline, and fair between keys.

Who has the higher priority goes first. Among keys of one priority turns are dealt out by deficit round robin: a key
earns its weight a turn and pays what its request costs, so one that asks
a lot waits behind itself, not before others.
A full line drops the last request of the key that holds most of it, so one key cannot shut the others out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

from services.gateway.admission.errors import Refused, no_room
from services.gateway.admission.keys import ApiKey

QUANTUM = 1.0
MOST_COST = 64.0
SPEED_STEP = 0.1
MOST_RETRY_S = 60.0


class _Waiter:
    __slots__ = ("cost", "in_line", "key_id", "turn")

    def __init__(self, key_id: str, cost: float) -> None:
        self.key_id = key_id
        self.cost = cost
        self.in_line = True
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _PriorityClass:
    """The waiting requests of one priority."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[_Waiter]] = {}
        self._weights: dict[str, int] = {}
        self._credits: dict[str, float] = {}
        self._round: deque[str] = deque()  # keys that wait; the first one has the turn

    def __bool__(self) -> bool:
        return bool(self._round)

    def add(self, waiter: _Waiter, weight: int) -> None:
        self._weights[waiter.key_id] = weight
        queue = self._queues.get(waiter.key_id)
        if queue is None:
            queue = self._queues[waiter.key_id] = deque()
            self._credits[waiter.key_id] = 0.0
            self._round.append(waiter.key_id)
        queue.append(waiter)

    def next(self) -> _Waiter:
        while True:
            key_id = self._round[0]
            queue = self._queues[key_id]
            if self._credits[key_id] >= queue[0].cost:
                waiter = queue.popleft()
                waiter.in_line = False
                self._credits[key_id] -= waiter.cost
                self._forget_if_empty(key_id)
                return waiter
            self._credits[key_id] += QUANTUM * self._weights[key_id]
            self._round.rotate(-1)

    def remove(self, waiter: _Waiter) -> None:
        self._queues[waiter.key_id].remove(waiter)
        waiter.in_line = False
        self._forget_if_empty(waiter.key_id)

    def longest(self) -> deque[_Waiter]:
        return max(self._queues.values(), key=len)

    def waiting(self, key_id: str) -> int:
        return len(self._queues.get(key_id, ()))

    def _forget_if_empty(self, key_id: str) -> None:
        if not self._queues[key_id]:
            del self._queues[key_id], self._weights[key_id], self._credits[key_id]
            self._round.remove(key_id)


class FairQueue:
    """Lets `most_running` requests in at once; others wait, `most_waiting` of them at most.

    Args:
        patience_s: longest that one waits.
        clock: seconds, monotonic.
    """

    def __init__(
        self, most_running: int, most_waiting: int, patience_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._patience_s = patience_s
        self._clock = clock
        self._ranks: dict[int, _PriorityClass] = {}
        self._between_s = 0.0  # two requests that leave; followed
        self._left_at = 0.0
        self.running = 0
        self.waiting = 0

    def try_enter(self) -> bool:
        """Takes a place when one is free and the queue is empty; `leave` gives it back."""
        if self.waiting or self.running >= self._most_running:
            return False
        self.running += 1
        return True

    async def enter(self, key: ApiKey, cost: float = 1.0, patience_s: float | None = None) -> None:
        """Waits for a place; `leave` gives it back.

        Args:
            key: whose request it is.
            cost: how much of its key's share it takes, at least 1 for an ordinary one.
            patience_s: how long it may wait if that is less than all others may.

        Raises:
            SluiceError: UNAVAILABLE, `overloaded`, when the line is full or the wait too long.
        """
        if self.try_enter():
            return
        if self.waiting >= self._most_waiting and not self._make_room(key):
            raise self._full()
        rank = self._ranks.setdefault(key.priority, _PriorityClass())
        waiter = _Waiter(key.id, min(cost, MOST_COST))
        rank.add(waiter, key.weight)
        self.waiting += 1
        longest = self._patience_s if patience_s is None else min(patience_s, self._patience_s)
        try:
            if not await self._turn_came(waiter, rank, longest):
                # Outside of the handler: the timeout's own error knows this task, and would be its context.
                raise no_room("line_timeout", f"no place became free within {longest:g} s", self.retry_after_s)
        finally:
            del waiter  # what is raised holds this call, which must not hold it as well

    async def _turn_came(self, waiter: _Waiter, rank: _PriorityClass, longest_s: float) -> bool:
        """False when it took too long."""
        try:
            async with asyncio.timeout(longest_s):
                await waiter.turn
        except BaseException as error:
            if waiter.in_line:
                rank.remove(waiter)
                self.waiting -= 1
            elif not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.leave()  # its turn came in the moment it gave up
            if not isinstance(error, TimeoutError):
                raise
            return False
        finally:
            del waiter
        return True

    def leave(self) -> None:
        """A request that was let in is over."""
        self.running -= 1
        self._measure()
        while self.waiting and self.running < self._most_running:
            waiter = self._ranks[max(priority for priority, rank in self._ranks.items() if rank)].next()
            self.waiting -= 1
            if not waiter.turn.done():  # it may have given up in this moment
                self.running += 1
                waiter.turn.set_result(None)

    def _measure(self) -> None:
        now = self._clock()
        if self._left_at:
            self._between_s += ((now - self._left_at) - self._between_s) * SPEED_STEP
        self._left_at = now if self.waiting else 0.0

    @property
    def retry_after_s(self) -> float:
        """When asking again may help: about how long all that wait now will take."""
        return min(max(self._between_s * (self.waiting + 1), 1.0), MOST_RETRY_S)

    def _make_room(self, key: ApiKey) -> bool:
        """Drops a waiting request that has less right to its place than the one that comes; False when none has."""
        ranks = [(priority, rank) for priority, rank in self._ranks.items() if rank and priority <= key.priority]
        if not ranks:
            return False
        priority, rank = min(ranks, key=lambda each: each[0])
        longest = rank.longest()
        if priority == key.priority and len(longest) <= rank.waiting(key.id) + 1:
            return False
        dropped = longest[-1]
        rank.remove(dropped)
        self.waiting -= 1
        if not dropped.turn.done():  # it may have given up in this moment
            dropped.turn.set_exception(self._full())
        return True

    def _full(self) -> Refused:
        return no_room("line_full", "the line is full", self.retry_after_s)
