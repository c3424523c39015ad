"""Scripts on a Redis: a few at a time, each with a deadline."""

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
from services.common.redis.target import Target

FAILURES = (RedisError, RedisClusterException, OSError)
"""Everything that Redis does wrong, inside `closed_is_lost`; TimeoutError is an OSError."""

_CLOSED = "the handler is closed"


@contextmanager
def closed_is_lost() -> Iterator[None]:
    """A connection that is found closed is one that was lost, which FAILURES names.

    uvloop raises a bare RuntimeError on writing to a connection that was reset while nobody used it, and the client of
    a cluster does not look before it writes. Only that one is meant: others are mistakes of ours, to be seen as such.
    """
    try:
        yield
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise ConnectionLost(f"closed while idle: {error}") from error


class Script:
    """A script; Redis knows it by `sha`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


class ScriptRunner:
    """Runs scripts, `connections` at once; more wait for their turn within their own deadline.

    Args:
        timeout_s: for waiting, connecting and the answer together.
    """

    def __init__(self, target: Target, timeout_s: float, connections: int = 8) -> None:
        self._redis = connect(target, timeout_s, connections)
        self._timeout_s = timeout_s
        # Behind sentinels and in clusters a pool refuses who comes when it is empty.
        self._turns = asyncio.Semaphore(connections)

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """What the script answers; one of FAILURES when it does not. In a cluster the keys are of one slot."""
        async with asyncio.timeout(self._timeout_s), self._turns:
            try:
                with closed_is_lost():
                    return await self._ask(script, keys, arguments)
            except ReadOnlyError:
                await hang_up(self._redis)
                raise

    async def _ask(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        where = await self._node(keys[0])
        try:
            return await self._redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments, **where)
        except NoScriptError:
            return await self._redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments, **where)

    async def _node(self, key: str) -> dict[str, Any]:
        if not isinstance(self._redis, RedisCluster):
            return {}
        await self._redis.initialize()
        return {"target_nodes": self._redis.get_node_from_key(key)}  # the client itself asks any node for scripts

    async def close(self) -> None:
        """Closes every connection."""
        await self._redis.aclose()
