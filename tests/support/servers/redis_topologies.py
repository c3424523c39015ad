"""Real Redis Clusters and Sentinels for tests, made of redis-servers on free ports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from redis.crc import key_slot

from services.common.net.ports import free_port
from services.common.settings.service import TlsSettings
from tests.support.servers.redis_server import RedisServer

SLOTS = 16_384
FENCED = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "5")
PrefixOf = Callable[[str], Sequence[str]]
"""Returns what runs a server, by its name."""


def no_prefix(_: str) -> Sequence[str]:
    """Returns nothing: the server runs by itself."""
    return ()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Waits for a condition; AssertionError when it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {timeout_s} s"
        time.sleep(0.05)


def ask(port: int, *command: str | int) -> Any:
    """One command to one server."""
    with Redis(port=port, protocol=2) as client:
        return client.execute_command(*command)


def node_id(node: RedisServer) -> str:
    """The id of a cluster's node."""
    return _text(ask(node.port, "CLUSTER", "MYID"))


def is_master(server: RedisServer) -> bool:
    """Whether a server says that it is a master."""
    return _text(ask(server.port, "ROLE")[0]) == "master"


def follows(server: RedisServer) -> bool:
    """Whether a server is a replica with all data of its master."""
    role = ask(server.port, "ROLE")
    return _text(role[0]) == "slave" and _text(role[3]) == "connected"


def replicates(server: RedisServer, port: int) -> bool:
    """Whether a server is a replica of the one at this port."""
    role = ask(server.port, "ROLE")
    return _text(role[0]) == "slave" and int(role[2]) == port


class RedisCluster:
    """Masters with the slots spread evenly, each with a replica or without.

    Args:
        size: number of masters.
        replicas: whether each master has a replica.
        node_timeout_ms: after which a node that does not answer is replaced by its replica.
        prefix_of: returns what runs a node, by the name of its folder.
        durable: as RedisServer's.
    """

    def __init__(
        self,
        folder: Path,
        size: int = 3,
        replicas: bool = False,
        node_timeout_ms: int = 5000,
        prefix_of: PrefixOf = no_prefix,
        durable: bool = False,
    ) -> None:
        self._folder = folder
        self._durable = durable
        self._prefix_of = prefix_of
        self._size = size
        self._node_timeout_ms = node_timeout_ms
        self._bus_ports: dict[int, int] = {}
        self.nodes = [self._new_node() for _ in range(2 * size if replicas else size)]

    def _new_node(self) -> RedisServer:
        bus = free_port()
        home = self._folder / f"node-{len(self._bus_ports)}"
        home.mkdir()
        timeout = ("--cluster-node-timeout", str(self._node_timeout_ms))
        options = ("--cluster-enabled", "yes", *timeout, "--cluster-port", str(bus), "--repl-diskless-sync-delay", "0")
        node = RedisServer(home, *options, durable=self._durable, prefix=self._prefix_of(home.name))
        self._bus_ports[node.port] = bus
        return node

    @property
    def url(self) -> str:
        """For settings; names two of the nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def start(self) -> None:
        """Starts the servers and makes a cluster of them."""
        size = self._size
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes[:size]):
            first, last = SLOTS * number // size, SLOTS * (number + 1) // size - 1
            ask(node.port, "CLUSTER", "ADDSLOTSRANGE", first, last)
            ask(node.port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            ask(self.nodes[0].port, "CLUSTER", "MEET", "127.0.0.1", node.port, self._bus_ports[node.port])
        wait_for(self._agree, "the cluster agrees")
        for master, replica in zip(self.nodes[:size], self.nodes[size:], strict=False):
            self._replicate(replica, master)

    def _replicate(self, replica: RedisServer, master: RedisServer) -> None:
        identity = node_id(master)
        wait_for(lambda: identity in _text(ask(replica.port, "CLUSTER", "NODES")), "the replica knows its master")
        ask(replica.port, "CLUSTER", "REPLICATE", identity)
        wait_for(lambda: follows(replica), "the replica follows")

    def master_of(self, key: str) -> RedisServer:
        """The node that serves a key, as the other nodes say."""
        owners = [owner for node in self.nodes if node.running for owner in _owners(node, key_slot(key.encode()))]
        port, _ = Counter(owners).most_common(1)[0]
        return next(node for node in self.nodes if node.port == port)

    def replica_of(self, master: RedisServer) -> RedisServer:
        """A running replica of a master."""
        return next(
            node for node in self.nodes if node.running and node is not master and replicates(node, master.port)
        )

    def move_slot(self, key: str, pause_s: float = 0.0) -> RedisServer:
        """Moves the hash slot of a key, key by key, to another master, which is returned.

        Args:
            pause_s: time for which each node has some of the slot's keys.
        """
        slot, source = key_slot(key.encode()), self.master_of(key)
        masters = [node for node in self.nodes if node.running and is_master(node)]
        target = next(node for node in masters if node is not source)
        ask(target.port, "CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        ask(source.port, "CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
        time.sleep(pause_s / 2)
        first = True
        while names := ask(source.port, "CLUSTER", "GETKEYSINSLOT", slot, 2):
            for name in names:
                ask(source.port, "MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
            if first:
                time.sleep(pause_s / 2)
                first = False
        for node in (target, source, *(other for other in masters if other not in (source, target))):
            ask(node.port, "CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
        return target

    def renew(self) -> None:
        """Replaces every node by a new one with other addresses, without losing data."""
        old = [node for node in self.nodes if node.running]
        for master in [node for node in old if is_master(node)]:
            fresh = self._new_node()
            fresh.start()
            self.nodes.append(fresh)
            ask(master.port, "CLUSTER", "MEET", "127.0.0.1", fresh.port, self._bus_ports[fresh.port])
            self._replicate(fresh, master)
            wait_for(lambda fresh=fresh: self._promoted(fresh), "the new node is master")  # type: ignore[misc]
        time.sleep(2 * self._node_timeout_ms / 1000)  # all nodes have heard of it
        for node in old:
            node.stop()

    def _promoted(self, replica: RedisServer) -> bool:
        if not is_master(replica):
            ask(replica.port, "CLUSTER", "FAILOVER")
            time.sleep(0.2)
        return is_master(replica)

    def keys(self) -> list[int]:
        """How many keys each node holds."""
        return [int(ask(node.port, "DBSIZE")) for node in self.nodes]

    def stop(self) -> None:
        """Ends all nodes."""
        for node in self.nodes:
            node.stop()

    def _agree(self) -> bool:
        wanted = (b"cluster_state:ok", b"cluster_known_nodes:%d" % len(self.nodes), b"cluster_slots_ok:16384")
        return all(set(wanted) <= set(_lines(ask(node.port, "CLUSTER", "INFO"))) for node in self.nodes)


class RedisSentinels:
    """A master, its replicas, and three sentinels that make a replica master when the master dies.

    Args:
        replicas: of the master; with more than one, a master without any refuses writes, as docs/redis.md recommends.
        tls: what all of them show and trust; they then want certificates of their callers and talk TLS to each other,
            and only the tests' own questions are plain text.
        prefix_of: returns what runs a server, by the name of its folder.
        durable: as RedisServer's, of the master and the replica.
    """

    SERVICE = "sluice"

    def __init__(
        self,
        folder: Path,
        tls: TlsSettings | None = None,
        prefix_of: PrefixOf = no_prefix,
        durable: bool = False,
        replicas: int = 1,
    ) -> None:
        more = [f"replica-{number}" for number in range(1, replicas)]
        names = ["master", "replica", *more, "sentinel-0", "sentinel-1", "sentinel-2"]
        homes = [folder / name for name in names]
        for home in homes:
            home.mkdir()
        self._ports = [free_port() for _ in homes] if tls else []
        secure = [[] if tls is None else _secure(tls, port) for port in self._ports or [0] * len(homes)]
        prefixes = [prefix_of(home.name) for home in homes]
        fenced = FENCED if replicas > 1 else ()
        self.master = RedisServer(homes[0], *secure[0], *fenced, durable=durable, prefix=prefixes[0])
        leader = self._ports[0] if tls else self.master.port
        following = ("--replicaof", f"127.0.0.1 {leader}", "--repl-diskless-sync-delay", "0", *fenced)
        self.replicas = [
            RedisServer(homes[place], *secure[place], *following, durable=durable, prefix=prefixes[place])
            for place in range(1, 1 + replicas)
        ]
        self.replica = self.replicas[0]
        self.sentinels = []
        first = 1 + replicas
        for home, flags, prefix in zip(homes[first:], secure[first:], prefixes[first:], strict=True):
            (home / "sentinel.conf").write_text(
                f"sentinel monitor {self.SERVICE} 127.0.0.1 {leader} 2\n"
                f"sentinel down-after-milliseconds {self.SERVICE} 1500\n"
                f"sentinel failover-timeout {self.SERVICE} 5000\n"
            )
            self.sentinels.append(RedisServer(home, "sentinel.conf", "--sentinel", *flags, prefix=prefix))

    @property
    def url(self) -> str:
        """For settings; names all sentinels."""
        ports = self._ports[1 + len(self.replicas) :] or [sentinel.port for sentinel in self.sentinels]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"{'rediss' if self._ports else 'redis'}+sentinel://{hosts}/{self.SERVICE}/0"

    def start(self) -> None:
        """Starts all; returns when the sentinels know each other and the replica follows."""
        for server in (self.master, *self.replicas, *self.sentinels):
            server.start()
        wait_for(self._settled, "the sentinels agree")

    def replicated(self) -> None:
        """Waits until the replica has what the master has."""
        assert ask(self.master.port, "WAIT", 1, 20_000) >= 1

    def stop(self) -> None:
        """Ends all."""
        for server in (*self.sentinels, *self.replicas, self.master):
            server.stop()

    def _settled(self) -> bool:
        for sentinel in self.sentinels:
            flat = ask(sentinel.port, "SENTINEL", "MASTER", self.SERVICE)
            state = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            state = {_text(key): _text(value) for key, value in state.items()}
            if (state["num-slaves"], state["num-other-sentinels"]) != (str(len(self.replicas)), "2"):
                return False
        links = (_lines(ask(replica.port, "INFO", "replication")) for replica in self.replicas)
        return all(b"master_link_status:up" in lines for lines in links)


def _owners(node: RedisServer, slot: int) -> list[int]:
    return [owner[1] for first, last, owner, *_ in _slots(node) if first <= slot <= last]


def _slots(node: RedisServer) -> list[Any]:
    with Redis(port=node.port, protocol=2) as client:
        client.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
        return list(client.execute_command("CLUSTER SLOTS"))


def _secure(tls: TlsSettings, port: int) -> list[str]:
    files = (("cert", tls.tls_cert), ("key", tls.tls_key), ("ca-cert", tls.tls_ca))
    flags = ["--tls-port", str(port), "--tls-replication", "yes", "--tls-auth-clients", "yes"]
    return flags + [text for name, file in files for text in (f"--tls-{name}-file", str(file))]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _lines(info: Any) -> list[bytes]:
    if isinstance(info, dict):
        return [f"{_text(key)}:{_text(value)}".encode() for key, value in info.items()]
    return list(info.replace(b"\r", b"").splitlines())
