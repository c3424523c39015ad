"""Runs Lua scripts on a Redis, with bounded concurrency and a deadline each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import NoScriptError, ReadOnlyError, RedisClusterException, RedisError

from services.common.redis.connect import connect, hang_up
from services.common.redis.target import RedisTarget

FAILURES = (RedisError, RedisClusterException, OSError)
"""Every failure of Redis, inside `closed_is_lost`; TimeoutError is an OSError."""

_CLOSED = "the handler is closed"


@contextmanager
def closed_is_lost() -> Iterator[None]:
    """Raises ConnectionError, which FAILURES includes, for a connection that is found closed.

    uvloop raises a bare RuntimeError on writes to a connection that was reset while idle, and the cluster client does
    not check first. Other RuntimeErrors are programming errors and propagate.
    """
    try:
        yield
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise ConnectionLost(f"closed while idle: {error}") from error


class Script:
    """A Lua script; Redis caches it by `sha`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


class ScriptRunner:
    """Runs up to `connections` scripts concurrently; further ones wait within their own deadline.

    Args:
        timeout_s: for waiting, connecting and the response together, seconds.
    """

    def __init__(self, target: RedisTarget, timeout_s: float, connections: int = 8) -> None:
        self._redis = connect(target, timeout_s, connections)
        self._timeout_s = timeout_s
        # With sentinels and in clusters, an exhausted pool raises instead of waiting.
        self._permits = asyncio.Semaphore(connections)

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Returns the script's result; raises one of FAILURES. In a cluster, all keys must be in one slot."""
        async with asyncio.timeout(self._timeout_s), self._permits:
            try:
                with closed_is_lost():
                    return await self._evaluate(script, keys, arguments)
            except ReadOnlyError:
                await hang_up(self._redis)
                raise

    async def _evaluate(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        options = await self._node(keys[0])
        try:
            return await self._redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments, **options)
        except NoScriptError:
            return await self._redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments, **options)

    async def _node(self, key: str) -> dict[str, Any]:
        if not isinstance(self._redis, RedisCluster):
            return {}
        await self._redis.initialize()
        return {"target_nodes": self._redis.get_node_from_key(key)}  # by default the client sends scripts to any node

    async def close(self) -> None:
        """Closes every connection."""
        await self._redis.aclose()
