"""Connections to the masters of a Redis, which follow them when they move."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import MovedError

from services.common.base.tasks import TaskOwner
from services.common.redis.connect import Address, open_pool
from services.common.redis.failures import FAILURES, Failure, classify, closed_is_lost
from services.common.redis.masters import Masters, masters_of
from services.common.redis.target import RedisTarget

log = logging.getLogger(__name__)

SEARCH_S = 5.0  # a search asks servers at once, each for at most a second
PAUSE_S = 0.2  # between searches
REFRESH_S = 30.0  # for servers that were replaced one by one, none of which was missed
DOUBTED_S = 30.0
"""Seconds after a failure for which the masters are doubted: one that ended may be back before another is elected."""
DOUBTED_REFRESH_S = 1.0


class RedisServers:
    """Knows the masters of one Redis, and finds them again after failures; shared by all clients of a user.

    Its state is the masters last found, and for each address an epoch, which grows with every failure that makes the
    connections to it suspect. Users report failures; `report` starts a search. At most one search runs at a time,
    searches have a pause between them, and calls go on with the masters last found meanwhile: in a cluster, most of
    them are well.

    Args:
        timeout_s: for connecting and for each question to a server, seconds.
    """

    def __init__(self, target: RedisTarget, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._masters: Masters = masters_of(target, timeout_s)
        self._epochs: dict[Address, int] = {}
        self._next_epoch = itertools.count(1)
        self._tasks = TaskOwner()
        self._searching: asyncio.Task[None] | None = None
        self._wanted = False
        self._found: asyncio.Future[None] | None = None
        self._found_at = float("-inf")
        self._doubted_until = float("-inf")
        self.revision = 0
        """Grows whenever an address or an epoch changes."""

    async def close(self) -> None:
        """Ends a search under way."""
        await self._tasks.close()

    def close_later(self, pool: Any) -> None:
        """Closes the idle connections of a pool in the background: the end of a TLS connection waits for its server."""
        self._tasks.spawn(pool.disconnect(inuse_connections=False), "redis-close")

    async def address(self, key: str) -> Address:
        """Returns the master that serves a key.

        Raises:
            ConnectionError: none can be found.
        """
        address = self.known(key)
        if address is None:
            try:
                await self.search()
            except FAILURES:  # once more: hosts may have stood still for longer than they are waited for
                await self.search()
            address = self._masters.address(key)
            if address is None:
                raise ConnectionLost("no master serves the key's hash slot")
        return address

    def known(self, key: str) -> Address | None:
        """Returns the master that served a key when last looked for, now and then also looks again; None: unknown."""
        address = self._masters.address(key)
        if address is not None:
            now = time.monotonic()
            refresh_s = REFRESH_S if now > self._doubted_until else DOUBTED_REFRESH_S
            if now - self._found_at > refresh_s:
                self._start_search()
        return address

    def epoch(self, address: Address) -> int:
        """Returns the epoch of a server; connections opened in an earlier one must not be used."""
        return self._epochs.get(address, 0)

    def current(self, address: Address, epoch: int) -> bool:
        """Returns whether a connection opened in an epoch of a server may still be used."""
        return epoch == self.epoch(address) and address in self._masters.addresses

    def report(self, error: BaseException, address: Address | None = None, epoch: int = 0) -> Failure:
        """Takes note of a failed call, and starts what it calls for.

        Args:
            address: the server of the call; None: it did not come to one.
            epoch: of the connection.

        Returns:
            What the failure means.
        """
        failure = classify(error)
        if isinstance(error, MovedError) and address is not None:
            self._masters.redirect(error.slot_id, redirected(error, address))
            self.revision += 1
        if failure.distrusts and address is not None and epoch == self.epoch(address):
            self._epochs[address] = next(self._next_epoch)
            self.revision += 1
        if failure.distrusts:
            self._doubted_until = time.monotonic() + DOUBTED_S
        if failure.searches:
            self._start_search()
        return failure

    async def search(self) -> None:
        """Waits for the result of a search that starts now or is under way; raises one of FAILURES if it fails."""
        await asyncio.shield(self._start_search())

    def _start_search(self) -> asyncio.Future[None]:
        self._wanted = True
        if self._found is None:
            self._found = asyncio.get_running_loop().create_future()
            self._found.add_done_callback(_retrieved)
        if self._searching is None or self._searching.done():
            self._searching = self._tasks.spawn(self._search(), "redis-search")
        return self._found

    async def _search(self) -> None:
        while self._wanted:
            self._wanted = False
            found, self._found = self._found, None
            before = set(self._masters.addresses)
            error: BaseException = ConnectionLost("the search for a master was ended")
            try:
                async with asyncio.timeout(SEARCH_S):
                    await self._masters.find()
            except FAILURES as failed:
                error = failed
                self._settle(found, failed)
                log.debug("no master found: %s", failed)
            else:
                self._took(before)
                self._settle(found, None)
            finally:
                self._settle(found, error)
            await asyncio.sleep(PAUSE_S)

    def _took(self, before: set[Address]) -> None:
        self._found_at = time.monotonic()
        now = set(self._masters.addresses)
        if now == before:
            return
        self.revision += 1
        self._epochs = {address: epoch for address, epoch in self._epochs.items() if address in now}
        if before:
            log.warning("Redis has other masters now: %s instead of %s", _names(now - before), _names(before - now))

    def _settle(self, found: asyncio.Future[None] | None, error: BaseException | None) -> None:
        if found is None or found.done():
            return
        if error is None:
            found.set_result(None)
        else:
            found.set_exception(error)


class Borrowed(NamedTuple):
    """A connection in use, to one server in one of its epochs."""

    address: Address
    epoch: int
    pool: Any
    connection: Any


class _Pool(NamedTuple):
    pool: Any
    client: Any


class RedisConnections:
    """Connections of one client to the servers of a Redis; those to a suspect or former master are closed.

    Args:
        connections: maximum number per server.
    """

    def __init__(self, servers: RedisServers, connections: int) -> None:
        self.servers = servers
        self._connections = connections
        self._pools: dict[tuple[Address, int], _Pool] = {}
        self._revision = servers.revision

    async def close(self) -> None:
        """Closes every connection."""
        pools, self._pools = self._pools, {}
        for pool, _ in pools.values():
            await pool.disconnect()

    async def execute(self, address: Address, *command: Any, deadline: float) -> Any:
        """Runs a command at a server, once; reports its failure, and raises one of FAILURES.

        Args:
            deadline: for connecting and for the reply, by the event loop's clock.
        """
        epoch = self.servers.epoch(address)
        pool = self._pool(address, epoch)
        try:
            with closed_is_lost():
                async with asyncio.timeout_at(deadline):
                    return await pool.client.execute_command(*command)
        except FAILURES as error:
            self.servers.report(error, address, epoch)
            raise
        finally:
            if (address, epoch) not in self._pools:
                self.servers.close_later(pool.pool)

    async def borrow(self, address: Address) -> Borrowed:
        """Takes a connected connection to a server, until `give_back`; raises one of FAILURES, without a report."""
        epoch = self.servers.epoch(address)
        pool = self._pool(address, epoch).pool
        return Borrowed(address, epoch, pool, await pool.get_connection())

    async def give_back(self, borrowed: Borrowed, usable: bool) -> None:
        """Returns a connection to its pool, closed unless it is usable and its server is still to be used."""
        if not usable or not self.servers.current(borrowed.address, borrowed.epoch):
            await borrowed.connection.disconnect(nowait=True)
        await borrowed.pool.release(borrowed.connection)

    def _pool(self, address: Address, epoch: int) -> _Pool:
        if self._revision != self.servers.revision:
            self._revision = self.servers.revision
            stale = [name for name in self._pools if not self.servers.current(*name)]
            for former in [self._pools.pop(name) for name in stale]:
                self.servers.close_later(former.pool)
        pool = self._pools.get((address, epoch))
        if pool is None:
            opened = open_pool(self.servers.target, address, self.servers.timeout_s, self._connections)
            pool = self._pools[address, epoch] = _Pool(opened, Redis.from_pool(opened))
        return pool


def redirected(error: MovedError, address: Address) -> Address:
    """Returns the server that a MOVED reply of a server names."""
    host, port = error.node_addr
    return (host or address[0], int(port))


def _names(addresses: set[Address]) -> str:
    return ", ".join(sorted(f"{host}:{port}" for host, port in addresses)) or "none"


def _retrieved(found: asyncio.Future[None]) -> None:
    if not found.cancelled():
        found.exception()  # waiting tasks receive it too; without them it is no unhandled error
