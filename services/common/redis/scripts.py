"""Runs Lua scripts on a Redis, with bounded concurrency and a deadline each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha1
from typing import Any

from redis.exceptions import MovedError, NoScriptError

from services.common.redis.connect import Address
from services.common.redis.failures import FAILURES, Failure, classify
from services.common.redis.servers import RedisConnections, RedisServers, redirected
from services.common.redis.target import RedisTarget

MAX_RESENT = {Failure.MOVED: 3, Failure.MIGRATING: 6, Failure.UNSETTLED: 6, Failure.DEMOTED: 1}
"""How often a script that was not executed is sent again, by failure; then its call fails."""
MAX_RESENT_READS = {**MAX_RESENT, Failure.LOST: 1}
"""The same for a script that only reads, which may be executed twice."""
UNSETTLED_PAUSE_S = 0.02  # doubled each time


class Script:
    """A Lua script; Redis caches it by `sha`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


class ScriptRunner:
    """Runs up to `connections` scripts concurrently; further ones wait within their own deadline.

    A script that a server refused because its keys are elsewhere is sent there, within the deadline. A script whose
    reply was lost may have been executed, and is sent again only if it reads. While a hash slot is being moved, a
    script waits for the end of that and does not follow ASK replies: it may use more keys than it names, and some are
    at either server.

    Args:
        timeout_s: for waiting, connecting and the response together, seconds.
    """

    def __init__(self, target: RedisTarget, timeout_s: float, connections: int = 8) -> None:
        self._servers = RedisServers(target, timeout_s)
        self._connections = RedisConnections(self._servers, connections)
        self._timeout_s = timeout_s
        # An exhausted pool would raise after waiting, which looks like a failure of Redis.
        self._permits = asyncio.Semaphore(connections)

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reads: bool = False) -> Any:
        """Returns the script's result; raises one of FAILURES. In a cluster, all keys must be in one slot.

        Args:
            reads: the script only reads with these arguments, so that it is sent again after a lost connection.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        async with asyncio.timeout_at(deadline):
            await self._permits.acquire()
        try:
            return await self._run(script, keys, arguments, deadline, MAX_RESENT_READS if reads else MAX_RESENT)
        finally:
            self._permits.release()

    async def _run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Any],
        deadline: float,
        most: Mapping[Failure, int],
    ) -> Any:
        async with asyncio.timeout_at(deadline):
            address = await self._servers.address(keys[0])
        failures: Counter[Failure] = Counter()
        while True:
            try:
                return await self._evaluate(address, script, keys, arguments, deadline)
            except FAILURES as error:
                failure = classify(error)
                failures[failure] += 1
                if failures[failure] > most.get(failure, 0):
                    raise
                async with asyncio.timeout_at(deadline):
                    address = await self._next(error, address, keys[0], failures)

    async def _next(self, error: BaseException, address: Address, key: str, failures: Counter[Failure]) -> Address:
        """Returns where a refused script is to be sent, after a pause if that is yet to settle."""
        failure = classify(error)
        if isinstance(error, MovedError):
            return redirected(error, address)
        if failure is Failure.DEMOTED:
            await self._servers.search()
        elif failure in (Failure.UNSETTLED, Failure.MIGRATING):
            await asyncio.sleep(UNSETTLED_PAUSE_S * 2 ** (failures[failure] - 1))
        elif failure is not Failure.LOST:
            raise error
        return await self._servers.address(key)

    async def _evaluate(
        self,
        address: Address,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Any],
        deadline: float,
    ) -> Any:
        call = (len(keys), *keys, *arguments)
        execute = self._connections.execute
        try:
            return await execute(address, "EVALSHA", script.sha, *call, deadline=deadline)
        except NoScriptError:
            return await execute(address, "EVAL", script.text, *call, deadline=deadline)

    async def close(self) -> None:
        """Closes every connection."""
        await self._servers.close()
        await self._connections.close()
