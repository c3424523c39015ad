"""Redis of each topology whose master moves: by a crash, a freeze, a planned fail-over, or because all is replaced."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from pathlib import Path

from tests.support.servers.redis_name import RedisName
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import (
    PrefixOf,
    RedisCluster,
    RedisSentinels,
    ask,
    follows,
    is_master,
    no_prefix,
    wait_for,
)

OPERATOR_S = 2.0  # until the operator of a single server has noticed its end


class MovingRedis(ABC):
    """A Redis with a replica that takes over.

    `fault` does something to the master of `key`, and returns the monotonic time at which there was a new one.
    `heal` brings the old one back as a replica.
    """

    faults: tuple[str, ...] = ("killed", "frozen", "planned")
    url: str

    def __init__(self, key: str) -> None:
        self.key = key
        self._ended: RedisServer | None = None

    async def __aenter__(self) -> MovingRedis:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def master(self) -> RedisServer:
        """The current master of the key."""

    async def fault(self, name: str) -> float:
        """Lets the master move; the time at which it had."""
        return await asyncio.to_thread(self._fault, name)

    def _fault(self, name: str) -> float:
        old = self.master()
        self._ended = old if name in ("killed", "frozen") else None
        successor = self.successor(old)
        if name == "killed":
            old.stop()
        elif name == "frozen":
            old.freeze()
        else:
            self.plan(old, successor)
        self.elect(old, successor)
        wait_for(lambda: self.moved(old, successor), "a replica is master")
        return time.monotonic()

    def moved(self, old: RedisServer, successor: RedisServer) -> bool:
        """Whether a replica of a master has become master; `successor` was one before."""
        return is_master(successor)

    async def heal(self) -> None:
        """Brings a killed or frozen master back; returns when it is a replica."""
        await asyncio.to_thread(self._heal)

    def _heal(self) -> None:
        ended, self._ended = self._ended, None
        if ended is None:
            return
        if ended.frozen:
            ended.thaw()
        else:
            ended.start()
        self.demote(ended)
        wait_for(lambda: follows(ended), "the old master follows")

    @abstractmethod
    def successor(self, old: RedisServer) -> RedisServer:
        """The replica of a master."""

    @abstractmethod
    def plan(self, old: RedisServer, successor: RedisServer) -> None:
        """Begins a planned fail-over."""

    @abstractmethod
    def elect(self, old: RedisServer, successor: RedisServer) -> None:
        """Makes the replica master, where no other process does."""

    @abstractmethod
    def demote(self, old: RedisServer) -> None:
        """Makes the old master a replica, where no other process does."""


class MovingSingle(MovingRedis):
    """One server behind a name, which an operator lets stand for its replica."""

    def __init__(self, folder: Path, key: str) -> None:
        super().__init__(key)
        homes = [folder / name for name in ("first", "second")]
        for home in homes:
            home.mkdir()
        self._servers = [RedisServer(home, "--repl-diskless-sync-delay", "0") for home in homes]
        self._name = RedisName()

    async def __aenter__(self) -> MovingRedis:
        await super().__aenter__()
        self._name.port = self._servers[0].port
        await self._name.__aenter__()
        self.url = self._name.url
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._name.__aexit__()
        await super().__aexit__()

    def start(self) -> None:
        first, second = self._servers
        first.start()
        second.start()
        ask(second.port, "REPLICAOF", "127.0.0.1", first.port)
        wait_for(lambda: follows(second), "the replica follows")

    def stop(self) -> None:
        for server in self._servers:
            server.stop()

    def master(self) -> RedisServer:
        return next(server for server in self._servers if server.port == self._name.port)

    def successor(self, old: RedisServer) -> RedisServer:
        return next(server for server in self._servers if server is not old)

    def plan(self, old: RedisServer, successor: RedisServer) -> None:
        ask(old.port, "FAILOVER", "TO", "127.0.0.1", successor.port)
        wait_for(lambda: is_master(successor), "the replica took over")

    def elect(self, old: RedisServer, successor: RedisServer) -> None:
        if not is_master(successor):
            time.sleep(OPERATOR_S)
            ask(successor.port, "REPLICAOF", "NO", "ONE")
        self._name.port = successor.port

    def demote(self, old: RedisServer) -> None:
        ask(old.port, "REPLICAOF", "127.0.0.1", self.successor(old).port)


class MovingSentinel(MovingRedis):
    """A master and its replicas with three sentinels; durable: two, of which a master needs one to take writes."""

    def __init__(self, folder: Path, key: str, prefix_of: PrefixOf = no_prefix, durable: bool = False) -> None:
        super().__init__(key)
        self._sentinels = RedisSentinels(folder, prefix_of=prefix_of, durable=durable, replicas=2 if durable else 1)
        self._servers = [self._sentinels.master, *self._sentinels.replicas]
        self.url = self._sentinels.url

    def start(self) -> None:
        self._sentinels.start()

    def stop(self) -> None:
        self._sentinels.stop()

    def master(self) -> RedisServer:
        return next(server for server in self._servers if server.running and is_master(server))

    def successor(self, old: RedisServer) -> RedisServer:
        return next(server for server in self._servers if server is not old)

    def moved(self, old: RedisServer, successor: RedisServer) -> bool:
        return any(server is not old and is_master(server) for server in self._servers)

    def plan(self, old: RedisServer, successor: RedisServer) -> None:
        ask(self._sentinels.sentinels[0].port, "SENTINEL", "FAILOVER", RedisSentinels.SERVICE)

    def elect(self, old: RedisServer, successor: RedisServer) -> None:
        """The sentinels do."""

    def demote(self, old: RedisServer) -> None:
        """The sentinels do."""


class MovingCluster(MovingRedis):
    """A cluster of three masters with a replica each."""

    faults = ("killed", "frozen", "planned", "resharded", "renewed")

    def __init__(
        self,
        folder: Path,
        key: str,
        node_timeout_ms: int = 2000,
        prefix_of: PrefixOf = no_prefix,
        durable: bool = False,
    ) -> None:
        super().__init__(key)
        self.cluster = RedisCluster(
            folder, replicas=True, node_timeout_ms=node_timeout_ms, prefix_of=prefix_of, durable=durable
        )
        self.url = self.cluster.url

    def start(self) -> None:
        self.cluster.start()

    def stop(self) -> None:
        self.cluster.stop()

    def master(self) -> RedisServer:
        return self.cluster.master_of(self.key)

    def successor(self, old: RedisServer) -> RedisServer:
        return self.cluster.replica_of(old)

    def plan(self, old: RedisServer, successor: RedisServer) -> None:
        ask(successor.port, "CLUSTER", "FAILOVER")

    def elect(self, old: RedisServer, successor: RedisServer) -> None:
        """The cluster does."""

    def demote(self, old: RedisServer) -> None:
        """The cluster does."""

    def _fault(self, name: str) -> float:
        if name in ("resharded", "renewed"):
            if name == "resharded":
                self.cluster.move_slot(self.key, pause_s=2.0)
            else:
                self.cluster.renew()
            return time.monotonic()
        return super()._fault(name)


TOPOLOGIES: dict[str, type[MovingSingle | MovingSentinel | MovingCluster]] = {
    "single": MovingSingle,
    "sentinel": MovingSentinel,
    "cluster": MovingCluster,
}
