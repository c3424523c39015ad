"""What is kept of responses, so that they can be read again and gone on from.

Every tenant sees its own responses only. What is kept is bounded in number, bytes and time, for each tenant and for all
of them together. A tenant over its bounds loses its own oldest response; when all together keep too much, the one that
keeps most does.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

PER_RESPONSE = 512
"""Bytes that keeping a response costs besides what it says, roughly."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response: JSON of its object, and of the items it was made from, those of earlier responses included."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return len(self.response) + len(self.items) + PER_RESPONSE


class ResponseStore(ABC):
    """Where responses are kept."""

    @abstractmethod
    def keep(self, owner: str, response_id: str, kept: StoredResponse) -> None:
        """Keeps a response from now on; does not wait."""

    @abstractmethod
    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response, or None when it is not kept (any more) or belongs to someone else."""

    @abstractmethod
    async def drop(self, owner: str, response_id: str) -> bool:
        """Forgets a response; whether it was there."""

    async def close(self) -> None:
        """Gives back what it holds of others."""
        return


class MemoryStore(ResponseStore):
    """In this process.

    Args:
        most: responses.
        most_bytes: of all of them together.
        longest_s: from keeping to forgetting, seconds.
        clock: seconds, monotonic.
        of_owner: most responses and bytes of one owner; None: as many as of all.
    """

    def __init__(
        self,
        most: int,
        most_bytes: int,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
        of_owner: tuple[int, int] | None = None,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        most_of_owner, bytes_of_owner = of_owner or (most, most_bytes)
        self._most_of_owner = min(most_of_owner, most)
        self._bytes_of_owner = min(bytes_of_owner, most_bytes)
        self._longest_s = longest_s
        self._clock = clock
        self._owners: dict[str, OrderedDict[str, tuple[float, StoredResponse]]] = {}
        self._sizes: dict[str, int] = {}
        self._ages: OrderedDict[tuple[str, str], float] = OrderedDict()  # oldest first
        self.size = 0

    def __len__(self) -> int:
        return len(self._ages)

    def keep(self, owner: str, response_id: str, kept: StoredResponse) -> None:
        """See ResponseStore; one that alone is over the limit is not kept."""
        self._forget(owner, response_id)
        self._expire()
        if not self._most_of_owner or kept.size > self._bytes_of_owner:
            return
        now = self._clock()
        self._owners.setdefault(owner, OrderedDict())[response_id] = (now, kept)
        self._sizes[owner] = self._sizes.get(owner, 0) + kept.size
        self._ages[owner, response_id] = now
        self.size += kept.size
        while len(self._owners[owner]) > self._most_of_owner or self._sizes[owner] > self._bytes_of_owner:
            self._forget(owner, next(iter(self._owners[owner])))
        while len(self._ages) > self._most or self.size > self._most_bytes:
            self._make_room(owner)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        self._expire()
        found = self._owners[owner].get(response_id) if owner in self._owners else None
        return found[1] if found else None

    async def drop(self, owner: str, response_id: str) -> bool:
        """See ResponseStore."""
        self._expire()
        return self._forget(owner, response_id)

    def _make_room(self, keeper: str) -> None:
        """Forgets a response, but not the one that `keeper` just kept."""
        too_many = len(self._ages) > self._most
        others = [one for one, kept in self._owners.items() if one != keeper or len(kept) > 1]
        # Of several that keep the same, the one that is adding loses its own.
        owner = max(others, key=lambda one: (len(self._owners[one]) if too_many else self._sizes[one], one == keeper))
        self._forget(owner, next(iter(self._owners[owner])))

    def _expire(self) -> None:
        oldest = self._clock() - self._longest_s
        while self._ages:
            (owner, response_id), kept_at = next(iter(self._ages.items()))
            if kept_at > oldest:
                return
            self._forget(owner, response_id)

    def _forget(self, owner: str, response_id: str) -> bool:
        found = self._owners[owner].pop(response_id, None) if owner in self._owners else None
        if found is None:
            return False
        del self._ages[owner, response_id]
        self.size -= found[1].size
        self._sizes[owner] -= found[1].size
        if not self._owners[owner]:
            del self._owners[owner], self._sizes[owner]
        return True
