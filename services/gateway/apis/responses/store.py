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

from services.common.errors import ErrorKind, SluiceError
from services.common.tasks import TaskOwner
from services.gateway.settings import GatewaySettings

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


class ResponseStore(ABC):
    """Interface of the response stores."""

    @abstractmethod
    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a response; does not block."""

    @abstractmethod
    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns the response, or None if it is not stored (any more) or belongs to another owner."""

    @abstractmethod
    async def swap(self, owner: str, response_id: str, expected: StoredResponse | None, stored: StoredResponse) -> bool:
        """Stores a value if the stored one is the expected one (None: there is none), and returns whether it was.

        Raises:
            SluiceError: TOO_LARGE if the value exceeds the limits of the tenant by itself.
        """

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Deletes a response and returns whether it was stored."""

    async def close(self) -> None:
        """Closes the store's connections."""
        return


class MemoryStore(ResponseStore):
    """Stores responses in this process.

    Args:
        max_responses: most responses in total.
        max_bytes: most bytes in total.
        ttl_s: seconds until a response expires.
        clock: returns monotonic seconds.
        owner_limits: most responses and bytes per owner; None for the total limits.
    """

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        owner_limits: tuple[int, int] | None = None,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        owner_responses, owner_bytes = owner_limits or (max_responses, max_bytes)
        self._max_owner_responses = min(owner_responses, max_responses)
        self._max_owner_bytes = min(owner_bytes, max_bytes)
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
        if not self._max_owner_responses or stored.size > self._max_owner_bytes:
            return
        now = self._clock()
        self._owners.setdefault(owner, OrderedDict())[response_id] = (now, stored)
        self._sizes[owner] = self._sizes.get(owner, 0) + stored.size
        self._stored_at[owner, response_id] = now
        self.size += stored.size
        while len(self._owners[owner]) > self._max_owner_responses or self._sizes[owner] > self._max_owner_bytes:
            self._remove(owner, next(iter(self._owners[owner])))
        while len(self._stored_at) > self._max_responses or self.size > self._max_bytes:
            self._evict(owner)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        self._expire()
        found = self._owners[owner].get(response_id) if owner in self._owners else None
        return found[1] if found else None

    async def swap(self, owner: str, response_id: str, expected: StoredResponse | None, stored: StoredResponse) -> bool:
        """See ResponseStore."""
        if await self.find(owner, response_id) != expected:
            return False
        if not self._max_owner_responses or stored.size > self._max_owner_bytes:
            raise too_large_to_store(self._max_owner_bytes)
        self.put(owner, response_id, stored)
        return True

    async def delete(self, owner: str, response_id: str) -> bool:
        """See ResponseStore."""
        self._expire()
        return self._remove(owner, response_id)

    def discard(self, owner: str, response_id: str) -> None:
        """Deletes a response, if it is stored."""
        self._remove(owner, response_id)

    def _evict(self, writer: str) -> None:
        """Evicts a response, but not the one that `writer` just stored."""
        too_many = len(self._stored_at) > self._max_responses
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


def last_responses(settings: GatewaySettings) -> MemoryStore:
    """Returns the bounded store of the last responses of all connections, a quarter of it for each tenant."""
    count, size = settings.max_connections, settings.websocket_kept_mb << 20
    share = 1 if settings.api_keys_file is None else 4
    limits = (max(1, count // share), size // share)
    return MemoryStore(count, size, settings.websocket_lifetime_s, owner_limits=limits)


def build_store(settings: GatewaySettings, tasks: TaskOwner) -> ResponseStore:
    """Returns the configured store; raises SluiceError for an invalid Redis URL."""
    url = settings.responses_redis_url.get_secret_value()
    total = (settings.responses_kept, settings.responses_kept_mb << 20)
    per_owner = total
    if settings.api_keys_file is not None:
        per_tenant = (settings.responses_kept_per_tenant, settings.responses_kept_per_tenant_mb << 20)
        per_owner = (min(total[0], per_tenant[0]), min(total[1], per_tenant[1]))
    if not url:
        return MemoryStore(*total, settings.responses_kept_s, owner_limits=per_owner)
    from services.gateway.apis.responses.redis_store import RedisStore  # optional: only needed with a Redis URL

    return RedisStore(url, *per_owner, settings.responses_kept_s, tasks, credentials=settings.redis_credentials)
