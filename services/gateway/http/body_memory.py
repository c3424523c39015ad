"""The memory that all request bodies of the gateway take together: bounded, and shared fairly between their senders.

A body has its share before it is read, by its announced length, so that bodies that are being read can always be read
to their end: what does not fit waits unread, and the transport stops its sender. The share covers the bytes and, once
they are parsed, the objects made of them; it is given back when the endpoint has returned.

Announcing a body costs its sender nothing, so slow senders must not shut the others out:

- One part of the memory is for small bodies, and one for those that are complete when they are first looked at. Nearly
  all requests are both, so no sender of unfinished bodies, large or small, delays them.
- When bodies wait for memory, those that have been arriving for longer than `GRACE_S` lose theirs and are refused,
  those first that have cost the most so far: bytes held times the time they were held. Honest bodies arrive in
  milliseconds, and large ones of slow networks lose only while there is not enough for all.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from services.common.budgets import BudgetPool
from services.common.errors import ErrorKind, SluiceError
from services.gateway.http.body_pace import BodyPace

SETTING = "--max-body-memory-mb"
SMALL_BYTES = 64 << 10
"""Bodies up to this length may use the part for small ones."""
PART_FOR_SMALL = 0.25
PART_FOR_COMPLETE = 0.25
WHILE_READ = 2
"""A body's share while it is read, in its lengths: at the end both its bytes and the texts in it are there."""
LEAST_SHARE = 8 << 10
"""Bytes; a small body keeps as much until its request is over, whatever it takes of it."""
GRACE_S = 1.0
LOOK_EVERY_S = 0.25


class BodyMemory:
    """Shares out the memory for bodies.

    Args:
        limit: bytes of all bodies together.
        pace: spaces out large ones.
    """

    def __init__(self, limit: int, pace: BodyPace | None = None) -> None:
        self.pace = pace or BodyPace()
        small, complete = int(limit * PART_FOR_SMALL), int(limit * PART_FOR_COMPLETE)
        self._small = BudgetPool("body_bytes", small, SETTING)
        self._large = BudgetPool("body_bytes", limit - small - complete, SETTING)
        self._complete = BudgetPool("body_bytes", complete, SETTING)
        self._coming: dict[BodyShare, None] = {}
        self._look: asyncio.TimerHandle | None = None

    @property
    def longest(self) -> int:
        """The longest body that can be read at all, bytes."""
        return self._large.limit // WHILE_READ

    @property
    def most_parsed(self) -> int:
        """The most that the objects of one body may take, bytes."""
        return self._large.limit

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self._small.used + self._large.used + self._complete.used

    def expect(self, deadline: asyncio.Timeout, timeout_s: float) -> BodyShare:
        """Returns the share of a body that is about to be read, empty as yet.

        Args:
            deadline: of what reads it; passes when the share is lost, or `timeout_s` is over: one timer looks after all
                bodies, because nearly all of them are complete when they are looked for.
            timeout_s: longest wait for memory, and then for the body.
        """
        share = BodyShare(self, deadline, timeout_s)
        self._coming[share] = None
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_round)
        return share

    def try_take(self, share: BodyShare, length: int, *, complete: bool = False) -> bool:
        """Takes the memory for a body of at most `length` bytes if it is there.

        Args:
            complete: all of the body is here already.
        """
        amount = max(length * WHILE_READ, LEAST_SHARE)
        if length <= SMALL_BYTES and self._small.try_take(amount):
            share.small += amount
        elif self._large.try_take(amount):
            share.large += amount
        elif complete and self._complete.try_take(amount):
            share.complete += amount
        else:
            return False
        return True

    async def take(self, share: BodyShare, length: int) -> None:
        """Waits for the memory for a body, or for the rest of one, of at most `length` bytes."""
        if self.try_take(share, length):
            return
        amount = max(length * WHILE_READ, LEAST_SHARE)
        asyncio.get_running_loop().call_soon(self._make_room)
        share.waiting = True
        if length <= SMALL_BYTES:
            await self._small.take(amount)
            share.small += amount
        else:
            await self._large.take(amount)
            share.large += amount
        share.begin()

    def arrived(self, share: BodyShare) -> None:
        """Notes that a body is complete: from now on its share cannot be lost."""
        self._coming.pop(share, None)

    def check(self, size: int) -> None:
        """Raises SluiceError(TOO_LARGE) for a body that takes more bytes once it is parsed than there ever are."""
        if size > self.most_parsed:
            raise self._large.refuse(
                f"The request body takes {size} bytes once it is parsed, more than the {self.most_parsed} there are; "
                "send fewer values in one request",
                kind=ErrorKind.TOO_LARGE,
                code="request_too_large",
            )

    def resize(self, share: BodyShare, size: int) -> None:
        """Makes the share of a body that is complete `size` bytes, or a little more, for the rest of its request.

        Raises:
            SluiceError: UNAVAILABLE when there is not enough now. What holds memory must not wait for more: all might
                wait for each other.
        """
        more = size - share.held
        if more <= 0:
            self._give_back(share, share.held - max(size, LEAST_SHARE))
        elif more <= SMALL_BYTES and self._small.try_grow(more):
            share.small += more
        elif self._large.try_grow(more):
            share.large += more
        elif self._complete.try_grow(more):
            share.complete += more
        else:
            self.check(size)
            raise self.refuse()

    def release(self, share: BodyShare) -> None:
        """Gives everything back: the body is not needed any more."""
        self._coming.pop(share, None)
        self._give_back(share, share.held)

    def _give_back(self, share: BodyShare, amount: int) -> None:
        if amount <= 0:
            return
        large, small = min(share.large, amount), min(share.small, amount - min(share.large, amount))
        complete = amount - large - small
        share.large -= large
        share.small -= small
        share.complete -= complete
        for pool, part in ((self._large, large), (self._small, small), (self._complete, complete)):
            if part:
                pool.give_back(part)

    def refuse(self) -> SluiceError:
        """Counts a body for which there is no memory, and returns its error."""
        return self._large.refuse(
            "The gateway holds as many request bodies as it may; try again soon",
            kind=ErrorKind.UNAVAILABLE,
            retry_after_ms=1000,
        )

    def _look_round(self) -> None:
        self._look = None
        now = monotonic()
        for share in [share for share in self._coming if now >= share.due]:
            self._give_up(share)
        self._make_room()
        if self._coming:
            self._look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_round)

    def _make_room(self) -> None:
        """Takes memory from bodies that arrive slowly, as long as others wait for it."""
        now = monotonic()
        for pool in (self._small, self._large):
            if not pool.missing:
                continue
            slow = [
                (held * (now - share.since), share)
                for share in self._coming
                if now - share.since > GRACE_S and (held := share.small if pool is self._small else share.large)
            ]
            for _, share in sorted(slow, key=lambda each: each[0], reverse=True):
                if not pool.missing:
                    break
                share.lost = True
                self._give_up(share)

    def _give_up(self, share: BodyShare) -> None:
        """Releases a share, and interrupts what reads the body."""
        self.release(share)
        if not share.deadline.expired():
            share.deadline.reschedule(asyncio.get_running_loop().time())


class BodyShare:
    """What the body of one request holds of the memory; to be ended by `BodyMemory.release`.

    Attributes:
        memory: that it belongs to.
        deadline: of what reads the body.
        small: bytes held of the part for small bodies.
        large: bytes held of the part for all.
        complete: bytes held of the part for complete bodies.
        since: when it began to arrive, on the monotonic clock.
        due: when it must have arrived, or got its memory.
        waiting: it waits for memory.
        lost: its memory was taken away for others while it was arriving.
    """

    __slots__ = ("_timeout_s", "complete", "deadline", "due", "large", "lost", "memory", "since", "small", "waiting")

    def __init__(self, memory: BodyMemory, deadline: asyncio.Timeout, timeout_s: float) -> None:
        self.memory = memory
        self.deadline = deadline
        self.small = 0
        self.large = 0
        self.complete = 0
        self._timeout_s = timeout_s
        self.since = monotonic()
        self.due = self.since + timeout_s
        self.waiting = False
        self.lost = False

    @property
    def held(self) -> int:
        """Bytes."""
        return self.small + self.large + self.complete

    def begin(self) -> None:
        """Ends the wait for memory; the time to read the body begins."""
        self.waiting = False
        self.since = monotonic()
        self.due = self.since + self._timeout_s
