"""Runs scripts on Redis, batching concurrent calls into pipelines. Every Redis error is raised as StoreUnavailable."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from hiredis import pack_command
from redis.exceptions import NoScriptError

from services.common.base.errors import internal
from services.common.base.shared_steps import shared_step
from services.common.base.tasks import TaskOwner
from services.common.redis.connect import Address
from services.common.redis.failures import FAILURES, closed_is_lost
from services.common.redis.servers import Borrowed, RedisConnections, RedisServers
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis_pipe import RedisPipe
from services.router.state.store.scripts import Script, all_scripts

log = logging.getLogger(__name__)

MAX_AT_ONCE = 128
"""Calls of scripts in one round trip."""
MAX_WAITING = 50_000
"""Calls that wait to be sent to Redis; further ones fail as if Redis were not available."""

Argument: TypeAlias = str | bytes | int | float


@contextmanager
def store_errors() -> Iterator[None]:
    """Raises StoreUnavailable for any Redis error in the context."""
    try:
        with closed_is_lost():
            yield
    except FAILURES as error:
        raise StoreUnavailable(_reason(error)) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Batch(NamedTuple):
    """Calls of one script that stay in order in one pipeline."""

    script: Script
    tag: str
    calls: Sequence[Sequence[Argument]]
    result: asyncio.Future[list[Any]]

    def pack(self, at: int, cached: bool) -> bytes:
        name = ("EVALSHA", self.script.sha) if cached else ("EVAL", self.script.text)
        packed: bytes = pack_command((*name, 1, self.tag, *self.calls[at]))  # type: ignore[arg-type]  # typed as 1-tuple
        return packed

    def packed(self) -> list[bytes]:
        """Returns the calls as they are sent; none, and fails, if one cannot be."""
        try:
            return [self.pack(at, cached=True) for at in range(len(self.calls))]
        except Exception as error:
            log.exception("a call of the script %s cannot be sent to Redis", self.script.name)
            if not self.result.done():
                failure = internal("The router cannot send this request to its store; see the log of the router.")
                failure.__cause__ = error
                self.result.set_exception(failure)
            return []

    def fail(self, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(StoreUnavailable(reason))

    def succeed(self, results: list[Any]) -> None:
        if not self.result.done():
            self.result.set_result(results)


class _Idle(NamedTuple):
    """A connection between two pipelines, which stays out of its pool: a lane takes it without waiting."""

    pipe: RedisPipe
    borrowed: Borrowed


class RedisClient:
    """Runs scripts and commands with a deadline.

    Calls made while all lanes are busy are batched into the next pipeline. Lanes keep their connections, so a client
    that runs scripts is not used for commands as well, unless it has connections left.

    A script that was refused because its server is no longer the master is not sent on to the new one: what the old
    master acknowledged last may be lost, so callers are to compare their state with the new one first. Nor does it
    follow a hash slot that is being moved: scripts derive keys, some of which would be missing at either server.

    Args:
        servers: the Redis; clients of one store share it, so that each learns from the failures of all.
        timeout_s: for every round trip, with connecting.
        lanes: concurrent round trips, each on a separate connection.
    """

    def __init__(self, servers: RedisServers, timeout_s: float, lanes: int = 2) -> None:
        self._servers = servers
        self._connections = RedisConnections(servers, lanes)
        self._timeout_s = timeout_s
        self._lanes = lanes
        self._busy_lanes = 0
        self._waiting: deque[_Batch] = deque()
        self._scripts = all_scripts()
        self._tasks = TaskOwner()
        self._idle: list[_Idle] = []

    async def close(self) -> None:
        """Cancels running calls and closes all connections."""
        await self._tasks.close()
        self._fail_waiting("closed")
        while self._idle:
            await self._connections.give_back(self._idle.pop().borrowed, usable=False)
        await self._connections.close()

    async def command(self, key: str, *command: Argument) -> Any:
        """Runs one command about one key on a connection that it does not share."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        with store_errors():
            async with asyncio.timeout_at(deadline):
                address = await self._servers.address(key)
            return await self._connections.execute(address, *command, deadline=deadline)

    async def run(self, name: str, tag: str, *args: Argument) -> Any:
        """Runs a script on the keys of a hash tag."""
        (result,) = await self._enqueue(name, tag, [args])
        return result

    async def run_many(self, name: str, tag: str, calls: Sequence[Sequence[Argument]]) -> list[Any]:
        """Runs a script several times in order, in one round trip if possible."""
        results: list[Any] = []
        for start in range(0, len(calls), MAX_AT_ONCE):
            results += await self._enqueue(name, tag, calls[start : start + MAX_AT_ONCE])
        return results

    def _enqueue(self, name: str, tag: str, calls: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        batch = _Batch(self._scripts[name], tag, calls, asyncio.get_running_loop().create_future())
        if len(self._waiting) >= MAX_WAITING:
            batch.fail(f"{MAX_WAITING} calls are queued")
            return batch.result
        self._waiting.append(batch)
        if self._busy_lanes < self._lanes:
            self._busy_lanes += 1
            self._tasks.spawn(self._run_lane(), "redis-lane")
        return batch.result

    async def _run_lane(self) -> None:
        batches: list[_Batch] = []
        reason = "closed"
        try:
            while self._waiting:
                batches, room = [], MAX_AT_ONCE
                while self._waiting and room > 0:
                    batches.append(self._waiting.popleft())
                    room -= len(batches[-1].calls)
                await self._send(batches)
        except Exception as error:
            reason = _reason(error)
            self._fail_waiting(reason)
            raise  # a bug; the task's owner logs it
        finally:
            self._busy_lanes -= 1
            for batch in batches:
                batch.fail(reason)

    async def _send(self, batches: list[_Batch]) -> None:
        """Sends each batch to its server; a server that fails concerns its own batches only."""
        groups: dict[Address | None, list[_Batch]] = {}
        for batch in batches:
            groups.setdefault(self._servers.known(batch.tag), []).append(batch)
        if len(groups) == 1:
            await self._send_group(batches)
        else:
            await asyncio.gather(*(self._send_group(group) for group in groups.values()))

    @shared_step("router.redis_scripts")
    async def _send_group(self, batches: list[_Batch]) -> None:
        """Sends batches to the server of the first one, and completes them."""
        packed = [(batch, calls) for batch in batches if (calls := batch.packed())]
        if not packed:
            return
        batches = [batch for batch, _ in packed]
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                address = await self._servers.address(batches[0].tag)
            results = await self._evaluate(address, packed, deadline)
        except FAILURES as error:
            reason = _reason(error)
            for batch in batches:
                batch.fail(reason)
            self._fail_waiting(reason, self._servers.known(batches[0].tag))  # they would fail in the same way
            return
        for batch, replies in zip(batches, results, strict=True):
            failed = next((reply for reply in replies if isinstance(reply, Exception)), None)
            if failed is None:
                batch.succeed(replies)
            else:
                batch.fail(_reason(failed))

    async def _evaluate(
        self, address: Address, packed: list[tuple[_Batch, list[bytes]]], deadline: float
    ) -> list[list[Any]]:
        """Returns the replies, or errors, of every call."""
        replies = iter(await self._round_trip(address, [call for _, calls in packed for call in calls], deadline))
        results = [list(islice(replies, len(calls))) for _, calls in packed]
        # A new or restarted server lacks the script; EVAL with the full text caches it. Only those calls are sent
        # again: others of their batch may have been executed, if another client has just loaded the script.
        unknown = [
            (number, at)
            for number, found in enumerate(results)
            for at, reply in enumerate(found)
            if isinstance(reply, NoScriptError)
        ]
        if unknown:
            texts = [packed[number][0].pack(at, cached=False) for number, at in unknown]
            for (number, at), reply in zip(unknown, await self._round_trip(address, texts, deadline), strict=True):
                results[number][at] = reply
        return results

    async def _round_trip(self, address: Address, commands: list[bytes], deadline: float) -> list[Any]:
        """Returns the response, or the ResponseError, of each command, and reports what it fails with."""
        epoch = self._servers.epoch(address)
        idle: _Idle | None = None
        try:
            with closed_is_lost():
                async with asyncio.timeout_at(deadline):
                    idle = await self._connected(address)
                    replies = await idle.pipe.run(commands)
        except BaseException as error:
            if idle is not None:  # replies may still be under way
                await self._connections.give_back(idle.borrowed, usable=False)
            self._servers.report(error, address, epoch)
            raise
        self._idle.append(idle)
        for failed in {type(reply): reply for reply in replies if isinstance(reply, Exception)}.values():
            self._servers.report(failed, address, epoch)
        return replies

    async def _connected(self, address: Address) -> _Idle:
        while (stale := next((idle for idle in self._idle if not self._usable(idle)), None)) is not None:
            self._idle.remove(stale)
            await self._connections.give_back(stale.borrowed, usable=False)
        for idle in self._idle:
            if idle.borrowed.address == address:
                self._idle.remove(idle)
                return idle
        borrowed = await self._connections.borrow(address)
        return _Idle(RedisPipe(borrowed.connection), borrowed)

    def _usable(self, idle: _Idle) -> bool:
        return not idle.pipe.lost and self._servers.current(idle.borrowed.address, idle.borrowed.epoch)

    def _fail_waiting(self, reason: str, address: Address | None = None) -> None:
        """Fails the calls that wait, of one server or of all."""
        kept: list[_Batch] = []
        while self._waiting:
            batch = self._waiting.popleft()
            if address is None or self._servers.known(batch.tag) == address:
                batch.fail(reason)
            else:
                kept.append(batch)
        self._waiting.extend(kept)
