"""Stores responses in Redis, shared by all gateways."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from importlib.resources import files
from math import inf
from typing import Any

from services.common.base.errors import unavailable
from services.common.base.tasks import TaskOwner
from services.common.redis.failures import FAILURES
from services.common.redis.scripts import Script, ScriptRunner
from services.common.redis.target import Credentials, parse
from services.gateway.apis.responses.store import ResponseStore, StoredResponse, StoreLimits, too_large_to_store

log = logging.getLogger(__name__)

MAX_PENDING_WRITES = 256
"""Responses that are being written to Redis; further ones are not stored, which is logged."""
MAX_PENDING_WRITES_PER_OWNER = MAX_PENDING_WRITES // 4
"""Responses of one tenant that are being written to Redis; further ones are not stored, which is logged."""
MAX_PENDING_BYTES = 64 << 20
"""Bytes of all responses that are being written to Redis; further ones are not stored, which is logged."""
_LENGTH = 8
_READS = frozenset(("age", "find", "used"))


class RedisStore(ResponseStore):
    """See ResponseStore. All keys are in one slot of a cluster, so that each step sees what all owners store.

    This gateway finds a response as soon as it is put, other gateways once it is written to Redis.

    Args:
        url: see `services.common.redis.target`.
        limits: of each owner, of all together, and of one value.
        ttl_s: seconds until a response expires.
        tasks: owns the pending writes.
        prefix: first part of every key.
        timeout_s: seconds until a Redis command times out.
        credentials: credentials that the URL does not contain.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid URL; the message never contains the password.
    """

    def __init__(
        self,
        url: str,
        limits: StoreLimits,
        ttl_s: float,
        tasks: TaskOwner,
        prefix: str = "sluice",
        timeout_s: float = 1.0,
        credentials: Credentials | None = None,
    ) -> None:
        self._redis = ScriptRunner(parse(url, credentials, "responses-redis-url"), timeout_s)
        self._limits = limits
        self._ttl_ms = int(ttl_s * 1000)
        self._tasks = tasks
        self._prefix = prefix
        self._script = Script(files("services.gateway.apis.responses").joinpath("responses.lua").read_text("utf-8"))
        self._pending: dict[tuple[str, str], StoredResponse] = {}
        self._writes: dict[tuple[str, str], asyncio.Task[None]] = {}

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """See ResponseStore; logs a warning if the response cannot be stored."""
        if (owner, response_id) in self._pending:  # the write in progress is followed by that of the newest
            self._pending[owner, response_id] = stored
            return
        by_owner = sum(name == owner for name, _ in self._pending)
        size = stored.size + sum(pending.size for pending in self._pending.values())
        full = len(self._pending) >= MAX_PENDING_WRITES or size > MAX_PENDING_BYTES
        if full or by_owner >= MAX_PENDING_WRITES_PER_OWNER:
            log.warning("response not stored: too many pending writes to Redis", extra={"response": response_id})
            return
        self._pending[owner, response_id] = stored
        self._writes[owner, response_id] = self._tasks.spawn(self._write(owner, response_id), "store-response")

    async def _write(self, owner: str, response_id: str) -> None:
        key, written = (owner, response_id), None
        try:
            while (stored := self._pending.get(key)) is not written and stored is not None:
                await self._run(owner, "put", response_id, *self._stored(stored), "")
                written = stored
        except FAILURES as error:
            log.warning("response not stored: %s", type(error).__name__, extra={"response": response_id})
        finally:
            self._pending.pop(key, None)
            self._writes.pop(key, None)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore; raises SluiceError(UNAVAILABLE) while Redis is unreachable."""
        if (pending := self._pending.get((owner, response_id))) is not None:
            return pending
        value = await self._query(owner, "find", response_id, self._ttl_ms)
        if value is None:
            return None
        end = _LENGTH + int.from_bytes(value[:_LENGTH], "big")
        return StoredResponse(value[_LENGTH:end], value[end:])

    async def age_s(self, owner: str, response_id: str) -> float:
        """See ResponseStore; raises SluiceError(UNAVAILABLE) while Redis is unreachable."""
        if (owner, response_id) in self._pending:
            return 0.0
        age_ms = await self._query(owner, "age", response_id)
        return inf if age_ms is None else int(age_ms) / 1000

    async def swap(self, owner: str, response_id: str, expected: StoredResponse | None, stored: StoredResponse) -> bool:
        """See ResponseStore; raises SluiceError(UNAVAILABLE) while Redis is unreachable."""
        if (writing := self._writes.get((owner, response_id))) is not None:
            await asyncio.wait({writing})  # of a value that was put before
        digest = "none" if expected is None else hashlib.sha1(_value(expected), usedforsecurity=False).hexdigest()
        if not self._limits.admit(stored):
            raise too_large_to_store(self._limits.value_bytes)
        return bool(await self._query(owner, "put", response_id, *self._stored(stored), digest))

    async def delete(self, owner: str, response_id: str) -> bool:
        """See ResponseStore; raises SluiceError(UNAVAILABLE) while Redis is unreachable."""
        was_pending = self._pending.pop((owner, response_id), None) is not None
        return bool(await self._query(owner, "delete", response_id)) or was_pending

    async def used(self, owner: str) -> tuple[int, int]:
        """See ResponseStore; raises SluiceError(UNAVAILABLE) while Redis is unreachable."""
        by_owner, by_all = await self._query(owner, "used")
        return int(by_owner), by_all

    async def close(self) -> None:
        """See ResponseStore."""
        await self._redis.close()

    async def _query(self, owner: str, *arguments: Any) -> Any:
        try:
            return await self._run(owner, *arguments)
        except FAILURES as error:
            log.warning("stored response unavailable, Redis failed: %s", type(error).__name__)
            raise unavailable(
                "The response store is unavailable; retry, or send the conversation as input.",
                code="store_unavailable",
            ) from None

    async def _run(self, owner: str, action: str, *arguments: Any) -> Any:
        keys, reads = [f"{{{self._prefix}:responses}}"], action in _READS
        return await self._redis.run(self._script, keys, [owner, action, *arguments], reads)

    def _stored(self, stored: StoredResponse) -> tuple[Any, ...]:
        limits = self._limits
        counts = (limits.owner_responses, limits.owner_bytes, limits.responses, limits.total_bytes)
        return (_value(stored), stored.size if limits.admit(stored) else -1, self._ttl_ms, *counts)


def _value(stored: StoredResponse) -> bytes:
    return len(stored.response).to_bytes(_LENGTH, "big") + stored.response + stored.items
