"""Stores responses so that clients can retrieve and continue them.

A tenant can access its own responses only. The store is bounded in number, bytes and time, per tenant and in total. A
tenant that exceeds its limits loses its own oldest response; when the total is exceeded, the tenant that uses most
loses its oldest.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, Self

from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.intake.json_intake import own_json
from services.common.net.intake.pace import BodyPace

PARSE_WAIT_S = 10.0
PER_RESPONSE = 512
"""Approximate overhead of a stored response, bytes."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response: JSON of its object and of its input items, including those of earlier responses."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return len(self.response) + len(self.items) + PER_RESPONSE


class StoreLimits(NamedTuple):
    """Bounds on what is stored: responses and bytes of each owner and of all together, and bytes of one value.

    A value is read as a whole, so it is bounded like what a request may send.
    """

    owner_responses: int
    owner_bytes: int
    responses: int
    total_bytes: int
    value_bytes: int

    @classmethod
    def of(cls, responses: int, size: int, owner: tuple[int, int] | None = None, value: int | None = None) -> Self:
        """Returns limits of which none exceeds that of all together; without `owner` and `value` they are equal."""
        owner_responses, owner_bytes = owner or (responses, size)
        owner_bytes = min(owner_bytes, size)
        value = owner_bytes if value is None else min(value, owner_bytes)
        return cls(min(owner_responses, responses), owner_bytes, responses, size, value)

    def admit(self, stored: StoredResponse) -> bool:
        """Returns whether a value does not exceed the limits by itself."""
        return self.owner_responses > 0 and stored.size <= self.value_bytes


class ResponseStore(ABC):
    """Interface of the response stores."""

    @cached_property
    def pace(self) -> BodyPace:
        """Schedules the parsing of large values; set it to that of other large bodies."""
        return BodyPace()

    async def parsed(self, text: bytes) -> Any:
        """Returns the JSON of a response, or of its items; raises SluiceError(UNAVAILABLE) if too many are parsed."""
        return await own_json(text, self.pace, PARSE_WAIT_S)

    @abstractmethod
    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a response; does not block."""

    @abstractmethod
    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns the response, or None if it is not stored (any more) or belongs to another owner."""

    @abstractmethod
    async def age_s(self, owner: str, response_id: str) -> float:
        """Returns the seconds since a response was last stored, by the store's clock; infinite if it is not stored."""

    @abstractmethod
    async def swap(self, owner: str, response_id: str, expected: StoredResponse | None, stored: StoredResponse) -> bool:
        """Stores a value if the stored one is the expected one (None: there is none), and returns whether it was.

        Raises:
            SluiceError: TOO_LARGE if the value exceeds the limits of the tenant by itself.
        """

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Deletes a response and returns whether it was stored."""

    @abstractmethod
    async def used(self, owner: str) -> tuple[int, int]:
        """Returns the bytes stored for an owner, and for all together."""

    async def close(self) -> None:
        """Closes the store's connections."""
        return


class MemoryStore(ResponseStore):
    """Stores responses in this process.

    Args:
        limits: of each owner, of all together, and of one value.
        ttl_s: seconds until a response expires.
        clock: returns monotonic seconds.
    """

    def __init__(self, limits: StoreLimits, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._ttl_s = ttl_s
        self._clock = clock
        self._owners: dict[str, OrderedDict[str, tuple[float, StoredResponse]]] = {}
        self._sizes: dict[str, int] = {}
        self._stored_at: OrderedDict[tuple[str, str], float] = OrderedDict()  # oldest first
        self.size = 0

    def __len__(self) -> int:
        return len(self._stored_at)

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """See ResponseStore; a response that exceeds the limits by itself is not stored."""
        self._remove(owner, response_id)
        self._expire()
        if not self._limits.admit(stored):
            return
        now = self._clock()
        self._owners.setdefault(owner, OrderedDict())[response_id] = (now, stored)
        self._sizes[owner] = self._sizes.get(owner, 0) + stored.size
        self._stored_at[owner, response_id] = now
        self.size += stored.size
        limits = self._limits
        while len(self._owners[owner]) > limits.owner_responses or self._sizes[owner] > limits.owner_bytes:
            self._remove(owner, next(iter(self._owners[owner])))
        while len(self._stored_at) > limits.responses or self.size > limits.total_bytes:
            self._evict(owner)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        self._expire()
        found = self._owners[owner].get(response_id) if owner in self._owners else None
        return found[1] if found else None

    async def age_s(self, owner: str, response_id: str) -> float:
        """See ResponseStore."""
        self._expire()
        return self._clock() - self._stored_at.get((owner, response_id), -inf)

    async def swap(self, owner: str, response_id: str, expected: StoredResponse | None, stored: StoredResponse) -> bool:
        """See ResponseStore."""
        if await self.find(owner, response_id) != expected:
            return False
        if not self._limits.admit(stored):
            raise too_large_to_store(self._limits.value_bytes)
        self.put(owner, response_id, stored)
        return True

    async def delete(self, owner: str, response_id: str) -> bool:
        """See ResponseStore."""
        self._expire()
        return self._remove(owner, response_id)

    async def used(self, owner: str) -> tuple[int, int]:
        """See ResponseStore."""
        self._expire()
        return self._sizes.get(owner, 0), self.size

    def discard(self, owner: str, response_id: str) -> None:
        """Deletes a response, if it is stored."""
        self._remove(owner, response_id)

    def _evict(self, writer: str) -> None:
        """Evicts a response, but not the one that `writer` just stored."""
        too_many = len(self._stored_at) > self._limits.responses
        candidates = [name for name, stored in self._owners.items() if name != writer or len(stored) > 1]
        # On a tie, the writer's own response is evicted.
        owner = max(
            candidates, key=lambda name: (len(self._owners[name]) if too_many else self._sizes[name], name == writer)
        )
        self._remove(owner, next(iter(self._owners[owner])))

    def _expire(self) -> None:
        expired_before = self._clock() - self._ttl_s
        while self._stored_at:
            (owner, response_id), stored_at = next(iter(self._stored_at.items()))
            if stored_at > expired_before:
                return
            self._remove(owner, response_id)

    def _remove(self, owner: str, response_id: str) -> bool:
        found = self._owners[owner].pop(response_id, None) if owner in self._owners else None
        if found is None:
            return False
        del self._stored_at[owner, response_id]
        self.size -= found[1].size
        self._sizes[owner] -= found[1].size
        if not self._owners[owner]:
            del self._owners[owner], self._sizes[owner]
        return True


def too_large_to_store(limit: int) -> SluiceError:
    """Returns the error for a value that exceeds the limits of a tenant by itself."""
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"The conversation exceeds the {limit} bytes that the gateway stores for a client.",
        code="conversation_too_large",
    )
