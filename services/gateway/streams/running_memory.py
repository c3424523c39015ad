"""Bounds the memory of all running requests together, and of each tenant: their prompts and their options.

A body's memory is given back when its endpoint has returned, but a stream needs the request until its end, to continue
it on another worker.
"""

from __future__ import annotations

from services.common.base.budgets import TenantPool

DEFAULT_BYTES = 1 << 30
TENANT_SHARE = 0.75
"""Largest part that one tenant may hold."""


class RunningMemory:
    """Counts what running requests hold.

    Args:
        limit: bytes of all requests together.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._pool = TenantPool("running_bytes", limit, "", int(limit * TENANT_SHARE), "")

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._pool.used

    def take(self, tenant: str, size: int) -> RunningShare:
        """Takes the memory of a request until its caller and the streams of its choices have released it.

        Raises:
            SluiceError: OVERLOADED, HTTP 429 if the tenant's requests hold too much, else 503.
        """
        self._pool.take(tenant, size, "The bytes of the prompts and options of running requests")
        return RunningShare(self._pool, tenant, size)


class RunningShare:
    """Memory held by one request; given back by the last of its holders, the first of which has taken it."""

    __slots__ = ("_holders", "_pool", "_size", "_tenant")

    def __init__(self, pool: TenantPool, tenant: str, size: int) -> None:
        self._pool, self._tenant, self._size = pool, tenant, size
        self._holders = 1

    def add_holder(self) -> None:
        """Adds a holder, which must call `release` once."""
        self._holders += 1

    def release(self) -> None:
        """Removes a holder."""
        self._holders -= 1
        if not self._holders:
            self._pool.give_back(self._tenant, self._size)
