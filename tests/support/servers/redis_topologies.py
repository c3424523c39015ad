"""Real Redis Clusters and Sentinels for tests, made of redis-servers on free ports."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis

from services.common.net.ports import free_port
from services.common.settings import TlsSettings
from tests.support.servers.redis_server import RedisServer

SLOTS = 16_384


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


class RedisCluster:
    """Masters only, with the slots spread evenly."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        self.nodes: list[RedisServer] = []
        self._bus_ports = [free_port() for _ in range(size)]
        for number, bus in enumerate(self._bus_ports):
            home = folder / f"node-{number}"
            home.mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--cluster-port", str(bus))
            self.nodes.append(RedisServer(home, *options))

    @property
    def url(self) -> str:
        """For settings; names two of the nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def start(self) -> None:
        """Starts the servers and makes a cluster of them."""
        size = len(self.nodes)
        for number, node in enumerate(self.nodes):
            node.start()
            first, last = SLOTS * number // size, SLOTS * (number + 1) // size - 1
            ask(node.port, "CLUSTER", "ADDSLOTSRANGE", first, last)
            ask(node.port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node, bus in zip(self.nodes[1:], self._bus_ports[1:], strict=True):
            ask(self.nodes[0].port, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_for(self._agree, "the cluster agrees")

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
    """A master, its replica, and three sentinels that make the replica master when the master dies.

    Args:
        tls: what all of them show and trust; they then want certificates of their callers and talk TLS to each other,
            and only the tests' own questions are plain text.
    """

    SERVICE = "sluice"

    def __init__(self, folder: Path, tls: TlsSettings | None = None) -> None:
        homes = [folder / name for name in ("master", "replica", "sentinel-0", "sentinel-1", "sentinel-2")]
        for home in homes:
            home.mkdir()
        self._ports = [free_port() for _ in homes] if tls else []
        secure = [[] if tls is None else _secure(tls, port) for port in self._ports or [0] * len(homes)]
        self.master = RedisServer(homes[0], *secure[0])
        leader = self._ports[0] if tls else self.master.port
        self.replica = RedisServer(
            homes[1], *secure[1], "--replicaof", f"127.0.0.1 {leader}", "--repl-diskless-sync-delay", "0"
        )
        self.sentinels = []
        for home, flags in zip(homes[2:], secure[2:], strict=True):
            (home / "sentinel.conf").write_text(
                f"sentinel monitor {self.SERVICE} 127.0.0.1 {leader} 2\n"
                f"sentinel down-after-milliseconds {self.SERVICE} 1500\n"
                f"sentinel failover-timeout {self.SERVICE} 5000\n"
            )
            self.sentinels.append(RedisServer(home, "sentinel.conf", "--sentinel", *flags))

    @property
    def url(self) -> str:
        """For settings; names all sentinels."""
        ports = self._ports[2:] or [sentinel.port for sentinel in self.sentinels]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"{'rediss' if self._ports else 'redis'}+sentinel://{hosts}/{self.SERVICE}/0"

    def start(self) -> None:
        """Starts all; returns when the sentinels know each other and the replica follows."""
        for server in (self.master, self.replica, *self.sentinels):
            server.start()
        wait_for(self._settled, "the sentinels agree")

    def replicated(self) -> None:
        """Waits until the replica has what the master has."""
        assert ask(self.master.port, "WAIT", 1, 20_000) >= 1

    def stop(self) -> None:
        """Ends all."""
        for server in (*self.sentinels, self.replica, self.master):
            server.stop()

    def _settled(self) -> bool:
        for sentinel in self.sentinels:
            flat = ask(sentinel.port, "SENTINEL", "MASTER", self.SERVICE)
            state = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            state = {_text(key): _text(value) for key, value in state.items()}
            if (state["num-slaves"], state["num-other-sentinels"]) != ("1", "2"):
                return False
        return b"master_link_status:up" in _lines(ask(self.replica.port, "INFO", "replication"))


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
