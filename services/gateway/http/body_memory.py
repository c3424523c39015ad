"""Bounds the memory of all request bodies together and shares it fairly between clients.

A body reserves its share, by its content length, before it is read, so that every body being read can be read to its
end: bodies that do not fit stay unread, and backpressure stops their clients. The share covers the bytes and then the
parsed objects; it is released when the endpoint has returned.

Announcing a body costs a client nothing, so slow clients must not lock out the others:

- One part of the memory is reserved for small bodies, and one for bodies that have arrived completely. Nearly all
  requests are both, so clients with incomplete bodies, large or small, do not delay them.
- While bodies wait for memory, those that have been arriving for longer than `GRACE_S` lose theirs and are rejected, in
  order of cost: bytes held times the time they were held. Ordinary bodies arrive in milliseconds; large ones from slow
  networks are rejected only while memory is short.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from services.common.base.budgets import BudgetPool
from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.intake.pace import BodyPace

SETTING = "--max-body-mb"
SMALL_BYTES = 64 << 10
"""Maximum length of bodies that may use the part for small ones."""
SMALL_SHARE = 0.25
COMPLETE_SHARE = 0.25
READ_FACTOR = 2
"""Share of a body while it is read, as a multiple of its length: its bytes and its decoded strings exist together."""
MIN_SHARE = 8 << 10
"""Bytes that a small body occupies of the memory for bodies until its request completes."""
GRACE_S = 1.0
CHECK_INTERVAL_S = 0.25


class BodyMemory:
    """Allocates memory to bodies.

    Args:
        limit: bytes of all bodies together.
        pace: schedules the parsing of large bodies.
    """

    def __init__(self, limit: int, pace: BodyPace | None = None) -> None:
        self.pace = pace or BodyPace()
        small, complete = int(limit * SMALL_SHARE), int(limit * COMPLETE_SHARE)
        self._small = BudgetPool("body_bytes", small, SETTING)
        self._large = BudgetPool("body_bytes", limit - small - complete, SETTING)
        self._complete = BudgetPool("body_bytes", complete, SETTING)
        self._arriving: dict[BodyShare, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def longest(self) -> int:
        """Maximum length of a body, bytes."""
        return self._large.limit // READ_FACTOR

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._small.used + self._large.used + self._complete.used

    def expect(self, deadline: asyncio.Timeout, timeout_s: float) -> BodyShare:
        """Returns an empty share for a body that is about to be read.

        Args:
            deadline: timeout around the read; triggered when the share is lost or `timeout_s` has passed. One timer
                serves all bodies, because nearly all of them have already arrived.
            timeout_s: longest wait for memory, and then for the body.
        """
        share = BodyShare(self, deadline, timeout_s)
        self._arriving[share] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_arriving)
        return share

    def try_take(self, share: BodyShare, length: int, *, complete: bool = False) -> bool:
        """Takes the memory for a body of at most `length` bytes if available.

        Args:
            complete: whether the whole body has arrived.
        """
        amount = max(length * READ_FACTOR, MIN_SHARE)
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
        """Waits for the memory for a body of at most `length` bytes, or for the rest of one."""
        if self.try_take(share, length):
            return
        amount = max(length * READ_FACTOR, MIN_SHARE)
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
        """Marks a body as complete, so that its share cannot be lost any more."""
        self._arriving.pop(share, None)

    def check(self, size: int) -> None:
        """Raises SluiceError(TOO_LARGE) if a parsed body would exceed the memory for bodies."""
        if size > self._large.limit:
            raise self._large.refuse(
                f"The request body takes {size} bytes once parsed, more than the limit of {self._large.limit}; "
                "send fewer values in one request",
                kind=ErrorKind.TOO_LARGE,
                code="request_too_large",
            )

    def resize(self, share: BodyShare, size: int) -> None:
        """Resizes the share of a complete body to at least `size` bytes for the rest of its request.

        Raises:
            SluiceError: UNAVAILABLE if memory is short. Requests that hold memory never wait for more, because that
                could deadlock.
        """
        more = size - share.held
        if more <= 0:
            self._shrink(share, share.held - max(size, MIN_SHARE))
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
        """Releases the whole share."""
        self._arriving.pop(share, None)
        self._shrink(share, share.held)

    def _shrink(self, share: BodyShare, amount: int) -> None:
        if amount <= 0:
            return
        large, small = min(share.large, amount), min(share.small, amount - min(share.large, amount))
        complete = amount - large - small
        share.large -= large
        share.small -= small
        share.complete -= complete
        for pool, size in ((self._large, large), (self._small, small), (self._complete, complete)):
            if size:
                pool.give_back(size)

    def refuse(self) -> SluiceError:
        """Counts a body without memory, and returns its error."""
        return self._large.refuse(
            "The memory for request bodies is full; try again soon",
            kind=ErrorKind.UNAVAILABLE,
            retry_after_ms=1000,
        )

    def _check_arriving(self) -> None:
        self._timer = None
        now = monotonic()
        for share in [share for share in self._arriving if now >= share.due]:
            self._revoke(share)
        self._make_room()
        if self._arriving:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_arriving)

    def _make_room(self) -> None:
        """Takes memory from slowly arriving bodies while others wait for it."""
        now = monotonic()
        for pool in (self._small, self._large):
            if not pool.missing:
                continue
            slow = [
                (held * (now - share.since), share)
                for share in self._arriving
                if now - share.since > GRACE_S and (held := share.small if pool is self._small else share.large)
            ]
            for _, share in sorted(slow, key=lambda each: each[0], reverse=True):
                if not pool.missing:
                    break
                share.lost = True
                self._revoke(share)

    def _revoke(self, share: BodyShare) -> None:
        """Releases a share and interrupts the read of its body."""
        self.release(share)
        if not share.deadline.expired():
            share.deadline.reschedule(asyncio.get_running_loop().time())


class BodyShare:
    """Memory held by the body of one request; released by `BodyMemory.release`.

    Attributes:
        memory: memory that the share belongs to.
        deadline: timeout around the read of the body.
        small: bytes held of the part for small bodies.
        large: bytes held of the part for all bodies.
        complete: bytes held of the part for complete bodies.
        since: monotonic time at which it began to arrive.
        due: monotonic time by which it must have arrived, or received its memory.
        waiting: whether it waits for memory.
        lost: whether its memory was given to others while it was arriving.
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
        """Bytes held."""
        return self.small + self.large + self.complete

    def begin(self) -> None:
        """Ends the wait for memory and starts the timeout of the body."""
        self.waiting = False
        self.since = monotonic()
        self.due = self.since + self._timeout_s
