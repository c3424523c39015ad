"""The memory that all request bodies of the gateway take together: bounded, and shared fairly between their senders.

A body has its share before it is read, by its announced length, so that bodies that are being read can always be read
to their end: what does not fit waits unread, and the transport stops its sender. The share covers the bytes and, once
they are parsed, the objects made of them; it is given back when the endpoint has returned.

Announcing a body costs its sender nothing, so two rules keep slow senders from shutting the others out:

- A part of the memory is for small bodies alone, which are nearly all requests there are.
- When bodies wait for memory, those that have been arriving for longer than `GRACE_S` lose theirs and are refused,
  those first that have cost the most so far: bytes held times the time they were held. Honest bodies arrive in
  milliseconds, and large ones of slow networks lose only while there is not enough for all.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from services.common.budgets import BudgetPool
from services.common.errors import ErrorKind, SluiceError

SETTING = "--max-body-memory-mb"
SMALL_BYTES = 64 << 10
"""Bodies up to this length may use the part for small ones."""
PART_FOR_SMALL = 0.25
WHILE_READ = 2
"""A body's share while it is read, in its lengths: at the end both its bytes and the texts in it are there."""
GRACE_S = 1.0
LOOK_EVERY_S = 0.25


class BodyMemory:
    """Shares out the memory for bodies.

    Args:
        limit: bytes of all bodies together.
    """

    def __init__(self, limit: int) -> None:
        small = int(limit * PART_FOR_SMALL)
        self._small = BudgetPool("body_bytes", small, SETTING)
        self._large = BudgetPool("body_bytes", limit - small, SETTING)
        self._arriving: dict[BodyShare, None] = {}
        self._look: asyncio.TimerHandle | None = None

    @property
    def longest(self) -> int:
        """The longest body that can be read at all, bytes."""
        return self._large.limit // WHILE_READ

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self._small.used + self._large.used

    async def take(self, share: BodyShare, length: int) -> bool:
        """Waits for the memory to read a body, or more of one than was known before, of at most `length` bytes.

        Returns:
            Whether it had to wait.
        """
        amount = length * WHILE_READ
        first, second = (self._small, self._large) if length <= SMALL_BYTES else (self._large, self._large)
        waited = False
        if first.try_take(amount):
            share.add(first, amount)
        elif second is not first and second.try_take(amount):
            share.add(second, amount)
        else:
            self._look_soon(0)
            share.waiting = waited = True
            await first.take(amount)
            share.waiting = False
            share.add(first, amount)
        self._arriving[share] = None
        return waited

    def arrived(self, share: BodyShare) -> None:
        """Notes that a body is complete: from now on its share cannot be lost."""
        self._arriving.pop(share, None)

    def check(self, size: int) -> None:
        """Raises SluiceError(TOO_LARGE) for a body that takes more bytes once it is parsed than there ever are."""
        if size > self._large.limit:
            raise self._large.refuse(
                f"The request body takes {size} bytes once it is parsed, more than the {self._large.limit} there are; "
                "send fewer values in one request",
                kind=ErrorKind.TOO_LARGE,
                code="request_too_large",
            )

    def grow(self, share: BodyShare, amount: int) -> None:
        """Enlarges the share of a body that is complete.

        Raises:
            SluiceError: UNAVAILABLE when there is not enough now. What holds memory must not wait for more: all might
                wait for each other.
        """
        for pool in (self._small, self._large) if amount <= SMALL_BYTES else (self._large,):
            if pool.try_grow(amount):
                share.add(pool, amount)
                return
        raise self.refuse()

    def refuse(self) -> SluiceError:
        """Counts a body for which there is no memory, and returns its error."""
        return self._large.refuse(
            "The gateway holds as many request bodies as it may; try again soon",
            kind=ErrorKind.UNAVAILABLE,
            retry_after_ms=1000,
        )

    def _look_soon(self, seconds: float) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(seconds, self._make_room)

    def _make_room(self) -> None:
        """Takes memory from bodies that arrive slowly, as long as others wait for it."""
        self._look = None
        now = monotonic()
        for pool in (self._small, self._large):
            if not pool.missing:
                continue
            slow = [share for share in self._arriving if now - share.since > GRACE_S and share.holds(pool)]
            for share in sorted(slow, key=lambda share: share.held * (now - share.since), reverse=True):
                if not pool.missing:
                    break
                share.lose()
        if self._small.missing or self._large.missing:
            self._look_soon(LOOK_EVERY_S)


class BodyShare:
    """What the body of one request holds of the memory; to be ended by `release`.

    Attributes:
        since: when it began to arrive, on the monotonic clock.
        waiting: the body waits for memory.
        lost: it was taken away for others while the body was arriving.
        deadline: of what reads the body; passes when the share is lost.
    """

    __slots__ = ("_held", "_memory", "deadline", "lost", "since", "waiting")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._held: dict[BudgetPool, int] = {}
        self.since = monotonic()
        self.waiting = False
        self.lost = False
        self.deadline: asyncio.Timeout | None = None

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(self._held.values())

    def holds(self, pool: BudgetPool) -> bool:
        """Whether it has bytes of this pool."""
        return pool in self._held

    def add(self, pool: BudgetPool, amount: int) -> None:
        """Notes bytes that were taken for it."""
        self._held[pool] = self._held.get(pool, 0) + amount
        self.since = monotonic()

    def resize(self, size: int) -> None:
        """Makes it `size` bytes for the rest of the request; SluiceError as `BodyMemory.grow`."""
        more = size - self.held
        if more > 0:
            self._memory.grow(self, more)
        else:
            self._give_back(-more)

    def lose(self) -> None:
        """Takes it away from a body that is arriving, whose reader is interrupted."""
        self.lost = True
        self.release()
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Gives everything back: the body is not needed any more."""
        self._memory.arrived(self)
        self._give_back(self.held)

    def _give_back(self, amount: int) -> None:
        for pool, held in list(self._held.items()):
            part = min(held, amount)
            amount -= part
            self._held[pool] = held - part
            if part == held:
                del self._held[pool]
            pool.give_back(part)
