"""Runs scripts on Redis, batching concurrent calls into pipelines. Every Redis error is raised as StoreUnavailable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from hiredis import pack_command
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError, ReadOnlyError

from services.common.redis.connect import connect, hang_up
from services.common.redis.scripts import FAILURES, closed_is_lost
from services.common.redis.target import RedisTarget
from services.common.tasks import TaskOwner
from services.router.store.base import StoreUnavailable
from services.router.store.redis_pipe import RedisPipe
from services.router.store.scripts import Script, all_scripts

MOST_AT_ONCE = 128  # calls per round trip
MOST_WAITING = 50_000

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

    def commands(self, cached: bool) -> list[tuple[Argument, ...]]:
        name = ("EVALSHA", self.script.sha) if cached else ("EVAL", self.script.text)
        return [(*name, 1, self.tag, *call) for call in self.calls]

    def fail(self, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(StoreUnavailable(reason))

    def succeed(self, results: list[Any]) -> None:
        if not self.result.done():
            self.result.set_result(results)


class RedisClient:
    """Runs scripts and commands with a deadline.

    Calls made while all lanes are busy are batched into the next pipeline. Lanes keep their connections, so a client
    that runs scripts is not used for commands as well, unless it has connections left.

    Args:
        timeout_s: for connecting and for every round trip.
        lanes: concurrent round trips, each on a separate connection.
    """

    def __init__(self, target: RedisTarget, timeout_s: float, lanes: int = 2) -> None:
        self.redis = connect(target, timeout_s, lanes)
        self._timeout_s = timeout_s
        self._lanes = lanes
        self._busy_lanes = 0
        self._waiting: deque[_Batch] = deque()
        self._scripts = all_scripts()
        self._tasks = TaskOwner()
        self._idle: list[RedisPipe] = []

    async def close(self) -> None:
        """Cancels running calls and closes all connections."""
        await self._tasks.close()
        self._fail_waiting("closed")
        await self._drop_idle()
        await self.redis.aclose()

    async def command(self, key: str, *command: Argument) -> Any:
        """Runs one command about one key on a connection that it does not share."""
        with store_errors():
            async with asyncio.timeout(self._timeout_s):
                return await self._command(key, command)

    async def _command(self, key: str, command: tuple[Argument, ...]) -> Any:
        if not isinstance(self.redis, RedisCluster):
            return await self.redis.execute_command(*command)
        await self.redis.initialize()
        return await self.redis.execute_command(*command, target_nodes=self.redis.get_node_from_key(key))

    async def run(self, name: str, tag: str, *args: Argument) -> Any:
        """Runs a script on the keys of a hash tag."""
        (result,) = await self._enqueue(name, tag, [args])
        return result

    async def run_many(self, name: str, tag: str, calls: Sequence[Sequence[Argument]]) -> list[Any]:
        """Runs a script several times in order, in one round trip if possible."""
        results: list[Any] = []
        for start in range(0, len(calls), MOST_AT_ONCE):
            results += await self._enqueue(name, tag, calls[start : start + MOST_AT_ONCE])
        return results

    def _enqueue(self, name: str, tag: str, calls: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        batch = _Batch(self._scripts[name], tag, calls, asyncio.get_running_loop().create_future())
        if len(self._waiting) >= MOST_WAITING:
            batch.fail(f"{MOST_WAITING} calls are queued")
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
                batches = self._next_batches()
                with closed_is_lost():
                    await self._send(batches)
        except Exception as error:
            reason = _reason(error)
            self._fail_waiting(reason)  # they would fail in the same way
            if not isinstance(error, FAILURES):
                raise  # a bug; the task's owner logs it
        finally:
            self._busy_lanes -= 1
            for batch in batches:
                batch.fail(reason)

    async def _send(self, batches: list[_Batch]) -> None:
        async with asyncio.timeout(self._timeout_s):
            results = await self._pipeline(batches, cached=True)
            unknown = [at for at, found in enumerate(results) if any(isinstance(each, NoScriptError) for each in found)]
            if unknown:  # a new or restarted server; EVAL with the full text caches the script
                retried = await self._pipeline([batches[at] for at in unknown], cached=False)
                for at, found in zip(unknown, retried, strict=True):
                    results[at] = found
        for batch, found in zip(batches, results, strict=True):
            failed = next((each for each in found if isinstance(each, Exception)), None)
            if failed is None:
                batch.succeed(found)
            else:
                batch.fail(_reason(failed))
        if any(isinstance(each, ReadOnlyError) for found in results for each in found):
            await self._drop_idle()
            await hang_up(self.redis)

    async def _pipeline(self, batches: list[_Batch], cached: bool) -> list[list[Any]]:
        commands = [command for batch in batches for command in batch.commands(cached)]
        flat = iter(await self._responses(commands))
        return [list(islice(flat, len(batch.calls))) for batch in batches]

    async def _responses(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        """Returns the response, or the ResponseError, of each command."""
        if isinstance(self.redis, RedisCluster):
            pipeline = self.redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute(raise_on_error=False))
        packed = [pack_command(command) for command in commands]  # type: ignore[arg-type]  # typed as 1-tuple
        pipe = await self._connected_pipe()
        try:
            found = await pipe.run(packed)
        except BaseException:
            await self._drop(pipe)  # replies may still be under way
            raise
        self._idle.append(pipe)
        return found

    async def _connected_pipe(self) -> RedisPipe:
        while self._idle:
            pipe = self._idle.pop()
            if not pipe.lost:
                return pipe
            await self._drop(pipe)
        return RedisPipe(await self.redis.connection_pool.get_connection())

    async def _drop(self, pipe: RedisPipe) -> None:
        await pipe.connection.disconnect(nowait=True)
        await self.redis.connection_pool.release(pipe.connection)

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._drop(self._idle.pop())

    def _next_batches(self) -> list[_Batch]:
        batches, room = [], MOST_AT_ONCE
        while self._waiting and room > 0:
            batches.append(self._waiting.popleft())
            room -= len(batches[-1].calls)
        return batches

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(reason)
