"""Stores what gateways share about the workers they operate in Redis."""

from __future__ import annotations

import logging
from typing import Any

from services.common.base.errors import unavailable
from services.common.redis.failures import FAILURES
from services.common.redis.scripts import Script, ScriptRunner
from services.common.redis.target import Credentials, parse
from services.gateway.backends.workers.fleet_store import MAX_ENTRIES, FleetStore, Kind, store_full

log = logging.getLogger(__name__)

_SCRIPT = Script("""
local key, action, name, value, most = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if action == 'all' then return redis.call('HGETALL', key) end
if action == 'remove' then return redis.call('HDEL', key, name) end
if redis.call('HEXISTS', key, name) == 0 and redis.call('HLEN', key) >= most then return 0 end
redis.call('HSET', key, name, value)
return 1
""")


class RedisFleetStore(FleetStore):
    """Shares everything with the other gateways of a Redis.

    Args:
        url: see `services.common.redis.target`.
        credentials: credentials that the URL does not contain.
        prefix: first part of every key.
        timeout_s: seconds until a Redis command times out.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid URL; the message never contains the password.
    """

    def __init__(
        self, url: str, credentials: Credentials | None = None, prefix: str = "sluice", timeout_s: float = 1.0
    ) -> None:
        self._redis = ScriptRunner(parse(url, credentials, "responses-redis-url"), timeout_s, connections=2)
        self._prefix = prefix

    async def all(self, kind: Kind) -> dict[str, str]:
        pairs = [part.decode() for part in await self._run(kind, "all")]
        return dict(zip(pairs[::2], pairs[1::2], strict=True))

    async def put(self, kind: Kind, name: str, value: str) -> None:
        if not await self._run(kind, "put", name, value):
            raise store_full(kind)

    async def remove(self, kind: Kind, name: str) -> bool:
        return bool(await self._run(kind, "remove", name))

    async def close(self) -> None:
        await self._redis.close()

    async def _run(self, kind: Kind, action: str, name: str = "", value: str = "") -> Any:
        try:
            return await self._redis.run(_SCRIPT, [f"{self._prefix}:fleet:{kind}"], [action, name, value, MAX_ENTRIES])
        except FAILURES as error:
            log.warning("state of the fleet unavailable, Redis failed: %s", type(error).__name__)
            raise unavailable(
                "The store of adapters and sleeping workers is unavailable; try again.", code="store_unavailable"
            ) from None
