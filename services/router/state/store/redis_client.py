"""Runs scripts on Redis, batching concurrent calls into pipelines. Every Redis error is raised as StoreUnavailable."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

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


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Batch:
    """Calls of one script that stay in order in one pipeline.

    Raises:
        SluiceError: INTERNAL if a call cannot be sent, which is logged.

    Attributes:
        result: the reply if there is only one call by itself, else the list of replies.
    """

    __slots__ = ("_alone", "_calls", "_script", "commands", "result", "tag")

    def __init__(self, script: Script, tag: str, calls: Sequence[Sequence[Argument]], alone: bool) -> None:
        self.tag = tag
        self._alone = alone
        self._script = script
        self._calls = calls
        self.commands: list[bytes] = []
        try:
            for call in calls:
                self.commands.append(pack_command(("EVALSHA", script.sha, 1, tag, *call)))  # type: ignore[arg-type]
        except Exception as error:
            log.exception("a call of the script %s cannot be sent to Redis", script.name)
            raise internal("The router cannot send this request to its store; see the log of the router.") from error
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def in_full(self, at: int) -> bytes:
        """Returns a call with the text of the script, which the server then caches."""
        packed: bytes = pack_command(("EVAL", self._script.text, 1, self.tag, *self._calls[at]))  # type: ignore[arg-type]
        return packed

    def fail(self, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(StoreUnavailable(reason))

    def complete(self, replies: list[Any]) -> None:
        """Sets the result; one failed call fails all."""
        for reply in replies:
            if isinstance(reply, Exception):
                self.fail(_reason(reply))
                return
        if not self.result.done():
            self.result.set_result(replies[0] if self._alone else replies)


class Connection:
    """A connection out of its pool, in one exchange or idle.

    Attributes:
        revision: of the servers when it was last known to be usable.
    """

    __slots__ = ("address", "borrowed", "pipe", "revision")

    def __init__(self, borrowed: Borrowed, pipe: RedisPipe, revision: int) -> None:
        self.borrowed = borrowed
        self.address = borrowed.address
        self.pipe = pipe
        self.revision = revision


class _Exchange:
    """Batches that one server runs in one round trip.

    Attributes:
        commands: what is sent.
        turn: the exchanges under way of one lane, each with another server; this one until it has ended.
        on: where it was sent.
        replies: those received, while calls are sent again; `unknown` are the places of these.
    """

    __slots__ = ("batches", "commands", "deadline", "on", "replies", "turn", "unknown")

    def __init__(self, batches: list[_Batch], deadline: float, turn: set[_Exchange]) -> None:
        self.batches = batches
        self.commands: list[bytes] = []
        for batch in batches:
            self.commands += batch.commands
        self.deadline = deadline
        self.turn = turn
        self.on: Connection | None = None
        self.replies: list[Any] = []
        self.unknown: list[int] = []
        turn.add(self)

    def in_full(self, replies: list[Any]) -> list[bytes]:
        """Returns the calls, with the texts of their scripts, that were refused because the server has no such script.

        Only those are sent again: others of their batch may have been executed, if another client has just loaded the
        script.
        """
        if self.unknown:
            return []
        self.replies = replies
        self.unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        calls = [(batch, at) for batch in self.batches for at in range(len(batch.commands))]
        return [batch.in_full(place) for batch, place in map(calls.__getitem__, self.unknown)]

    def completed(self, replies: list[Any]) -> list[Any]:
        """Returns the last reply to every call, once the replies to those that were sent again are there."""
        for at, reply in zip(self.unknown, replies, strict=True):
            self.replies[at] = reply
        return self.replies


class RedisClient:
    """Runs scripts and commands with a deadline.

    Calls made while all lanes are busy are batched into the next pipeline. Lanes keep their connections, so a client
    that runs scripts is not used for commands as well, unless it has connections left. A task runs only to connect.

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
        self._under_way: set[_Exchange] = set()
        self._scripts = all_scripts()
        self._tasks = TaskOwner()
        self._idle: list[Connection] = []

    async def close(self) -> None:
        """Fails running calls and closes all connections."""
        under_way, self._under_way = self._under_way, set()
        for exchange in under_way:
            for batch in exchange.batches:
                batch.fail("closed")
        self._fail_waiting("closed")
        await self._tasks.close()
        connections = [exchange.on for exchange in under_way if exchange.on is not None] + self._idle
        self._idle = []
        for connection in connections:
            await self._connections.give_back(connection.borrowed, usable=False)
        await self._connections.close()

    async def command(self, key: str, *command: Argument) -> Any:
        """Runs one command about one key on a connection that it does not share."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            connection = self._at_hand(self._servers.known(key)) or await self._connect(key, deadline)
            try:
                (reply,) = await connection.pipe.send((pack_command(command),), deadline)  # type: ignore[arg-type]
            except BaseException as error:
                self._discard(connection, error)
                raise
        except FAILURES as error:
            raise StoreUnavailable(_reason(error)) from error
        self._idle.append(connection)
        if isinstance(reply, Exception):
            self._report_refusals(connection, [reply])
            raise StoreUnavailable(_reason(reply)) from reply
        return reply

    def run(self, name: str, tag: str, *args: Argument) -> asyncio.Future[Any]:
        """Runs a script on the keys of a hash tag."""
        return self._enqueue(_Batch(self._scripts[name], tag, (args,), alone=True))

    async def run_many(self, name: str, tag: str, calls: Sequence[Sequence[Argument]]) -> list[Any]:
        """Runs a script several times in order, in one round trip if possible."""
        results: list[Any] = []
        for start in range(0, len(calls), MAX_AT_ONCE):
            batch = _Batch(self._scripts[name], tag, calls[start : start + MAX_AT_ONCE], alone=False)
            results += await self._enqueue(batch)
        return results

    def _enqueue(self, batch: _Batch) -> asyncio.Future[Any]:
        if len(self._waiting) >= MAX_WAITING:
            batch.fail(f"{MAX_WAITING} calls are queued")
            return batch.result
        self._waiting.append(batch)
        if self._busy_lanes < self._lanes:
            self._busy_lanes += 1
            asyncio.get_running_loop().call_soon(self._run_lane)  # so that calls made together share a pipeline
        return batch.result

    def _run_lane(self) -> None:
        """Sends what waits, each batch to its server: one that fails concerns its own batches only."""
        groups: dict[Address | None, list[_Batch]] = {}
        room = MAX_AT_ONCE
        while self._waiting and room > 0:
            batch = self._waiting.popleft()
            groups.setdefault(self._servers.known(batch.tag), []).append(batch)
            room -= len(batch.commands)
        if not groups:
            self._busy_lanes -= 1
            return
        turn: set[_Exchange] = set()
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        for address, batches in groups.items():
            exchange = _Exchange(batches, deadline, turn)
            self._under_way.add(exchange)
            if (connection := self._at_hand(address)) is not None:
                self._send(exchange, connection, exchange.commands)
            else:
                self._tasks.spawn(self._open(exchange), "redis-connect")

    async def _open(self, exchange: _Exchange) -> None:
        """Sends an exchange on a connection that is opened for it."""
        try:
            connection = await self._connect(exchange.batches[0].tag, exchange.deadline)
        except Exception as error:
            self._fail(exchange, error)
        else:
            self._send(exchange, connection, exchange.commands)

    def _send(self, exchange: _Exchange, connection: Connection, commands: list[bytes]) -> None:
        exchange.on = connection
        connection.pipe.send(commands, exchange.deadline).add_done_callback(partial(self._received, exchange))

    @shared_step("router.redis_scripts")
    def _received(self, exchange: _Exchange, replied: asyncio.Future[list[Any]]) -> None:
        """Completes the batches of an exchange, once the server has run those whose script it lacked."""
        connection, error = exchange.on, replied.exception()
        if exchange not in self._under_way or connection is None:
            return  # the client was closed
        if error is not None:
            self._fail(exchange, error)
            return
        try:
            replies, refused = replied.result(), False
            if exchange.unknown:
                replies = exchange.completed(replies)
            for reply in replies:
                refused = refused or isinstance(reply, Exception)
            if refused:
                if again := exchange.in_full(replies):
                    self._send(exchange, connection, again)
                    return
                self._report_refusals(connection, replies)
        except Exception as mistake:
            self._fail(exchange, mistake)
            return
        self._idle.append(connection)
        at = 0
        for batch in exchange.batches:
            batch.complete(replies[at : (at := at + len(batch.commands))])
        self._end(exchange)

    def _report_refusals(self, connection: Connection, replies: list[Any]) -> None:
        for refusal in {type(reply): reply for reply in replies if isinstance(reply, Exception)}.values():
            self._servers.report(refusal, connection.address, connection.borrowed.epoch)

    def _fail(self, exchange: _Exchange, error: BaseException) -> None:
        if exchange.on is not None:
            self._discard(exchange.on, error)
        reason, address = _reason(error), None
        for batch in exchange.batches:
            batch.fail(reason)
        if isinstance(error, FAILURES):
            address = self._servers.known(exchange.batches[0].tag)
        else:
            log.error("an exchange with Redis failed by a mistake", exc_info=error)
        self._fail_waiting(reason, address)  # they would fail in the same way
        self._end(exchange)

    def _end(self, exchange: _Exchange) -> None:
        self._under_way.discard(exchange)
        exchange.turn.discard(exchange)
        if exchange.turn:
            return
        if self._waiting:
            self._run_lane()
        else:
            self._busy_lanes -= 1

    def _at_hand(self, address: Address | None) -> Connection | None:
        """Returns an idle connection to a server that is known to be usable; None if there is none."""
        revision = self._servers.revision
        for at, idle in enumerate(self._idle):
            if idle.revision == revision and idle.address == address and not idle.pipe.lost:
                return self._idle.pop(at)
        return None

    async def _connect(self, key: str, deadline: float) -> Connection:
        """Returns a connection to the server of a key; reports a failure of the server, and raises one of FAILURES."""
        async with asyncio.timeout_at(deadline):
            address = await self._servers.address(key)
        epoch = self._servers.epoch(address)
        try:
            with closed_is_lost():
                async with asyncio.timeout_at(deadline):
                    return await self._connected(address)
        except BaseException as error:
            self._servers.report(error, address, epoch)
            raise

    async def _connected(self, address: Address) -> Connection:
        idle, self._idle = self._idle, []
        for connection in idle:
            usable = self._servers.current(connection.address, connection.borrowed.epoch) and not connection.pipe.lost
            if usable:
                connection.revision = self._servers.revision
                self._idle.append(connection)
            else:
                self._give_back(connection)
        found = self._at_hand(address)
        if found is None:
            revision = self._servers.revision
            borrowed = await self._connections.borrow(address)
            found = Connection(borrowed, RedisPipe(borrowed.connection), revision)
        return found

    def _discard(self, connection: Connection, error: BaseException) -> None:
        """Closes a connection on which replies may still be under way, and reports why."""
        self._give_back(connection)
        self._servers.report(error, connection.address, connection.borrowed.epoch)

    def _give_back(self, connection: Connection) -> None:
        self._tasks.spawn(self._connections.give_back(connection.borrowed, usable=False), "redis-close")

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
