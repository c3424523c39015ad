"""A running suite whose processes a fault reaches by name, its Redis among them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from services.common.net.ports import free_port
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.faults.access import PLAIN
from tests.support.faults.breaks import NOTHING, Break
from tests.support.faults.clocks import Clocks
from tests.support.faults.credentials import Credentials
from tests.support.faults.entrances import Entrances
from tests.support.faults.name_server import NameServer
from tests.support.faults.network import Network, run
from tests.support.faults.parts import Topology, victims
from tests.support.servers.loose_suite import LOOPBACK, LooseSuite
from tests.support.servers.moving_redis import MovingCluster, MovingRedis, MovingSentinel
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import no_prefix
from tests.support.waiting import until

REDIS, DNS = "redis", "dns"
DOMAIN = "suite"
STEP_MS = 20
WHOLE_S = 90.0
END_S = 30.0
TAG = "{sluice:tiny}"
WORKER = ("--engine-args", f"timing=fixed,fixed_step_ms={STEP_MS}", "--drain-s", "2")
SCOPES = ("--anonymous-scopes", "infer,priority,pin-worker,template,operate")
MOVING = {"sentinel": MovingSentinel, "cluster": MovingCluster}


class Place:
    """A suite of one topology.

    Args:
        folder: for the model, Redis and the logs.
        network: in which victims have namespaces of their own; None: all listen on loopback.
        broken: what is deliberately wrong with the suite.
        clocks: of victims, and of every Redis whose master moves; None: all have the machine's.
    """

    def __init__(
        self,
        topology: Topology,
        folder: Path,
        network: Network | None = None,
        broken: Break = NOTHING,
        clocks: Clocks | None = None,
    ) -> None:
        self.topology = topology
        self.network = network
        self.clocks = clocks
        self.logs = folder / "logs"
        self.logs.mkdir()
        names = victims(topology) if network is not None else []
        self._hosts = {name: network.host(name) for name in names} if network is not None else {}
        self._host = LOOPBACK if network is None else network.own_host
        prefixes = {name: network.prefix(name) for name in names} if network is not None else {}
        if clocks is not None:
            prefixes = {name: (*prefixes.get(name, ()), *clocks.prefix(name)) for name in victims(topology)}
        self.redis_home = folder / "redis"
        self.redis_home.mkdir()
        self.moving: MovingRedis | None = None
        if topology.redis in MOVING:
            prefix_of = no_prefix if clocks is None else clocks.prefix
            self.moving = MOVING[topology.redis](
                self.redis_home, TAG, prefix_of=prefix_of, durable=broken.redis_durable
            )
        self.names_server: NameServer | None = None
        if topology.names:
            assert network is not None
            self.names_server = NameServer(self._hosts.pop(DNS), self._addresses(), prefixes.pop(DNS))
            resolver = folder / "resolv.conf"
            resolver.write_text(f"nameserver {network.host(DNS)}\noptions timeout:1 attempts:2\n")
            run("mount", "--bind", str(resolver), str(Path("/etc/resolv.conf").resolve()))
        host, prefix = self._hosts.pop(REDIS, self._host), prefixes.pop(REDIS, ())
        # Its log is rewritten before it fills the disk, which is a small one.
        rewrite = ("--auto-aof-rewrite-min-size", "8mb")
        self.redis = RedisServer(self.redis_home, *rewrite, durable=broken.redis_durable, host=host, prefix=prefix)
        self.credentials = Credentials(folder, {self._host, *self._hosts.values()}) if topology.secured else None
        self.access = PLAIN if self.credentials is None else self.credentials.access()
        self._model = build_qwen2_vl(folder / "model")
        self._pickers = {name: f"{self._hosts.get(name, self._host)}:{free_port()}" for name in ("router", "router-1")}
        self._prefixes = prefixes
        self._broken = broken
        self._started = False
        self.suite: LooseSuite
        self.entrances: Entrances | None = None

    def _addresses(self) -> Mapping[str, str]:
        """The names that processes have for each other."""
        named = (*("preprocess", "preprocess-1", "router", "router-1"), "postprocess-0", "postprocess-1")
        return {f"{name}.{DOMAIN}": self._hosts.get(name, self._host) for name in named}

    def start(self) -> None:
        """Starts everything; returns when the suite is whole."""
        if self.names_server is not None:
            self.names_server.start()
        if self.moving is not None:
            self.moving.start()
        else:
            self.redis.start()
        url = self.redis.url if self.moving is None else self.moving.url
        self.suite = LooseSuite(
            self._model,
            workers=self.topology.workers,
            prefill=self.topology.prefill,
            preprocess=2,
            routers=2,
            gateways=2,
            gateway_flags=("--responses-redis-url", url, "--drain-s", "5", *SCOPES, *self._broken.gateway_flags),
            worker_flags=(
                "--engine-args",
                f"timing=fixed,fixed_step_ms={STEP_MS}",
                *WORKER,
                *self._broken.worker_flags,
            ),
            flags_of=self._flags(url),
            code_of=self._broken.code_of,
            host=self._host,
            host_of=self._hosts,
            known_as={name.removesuffix(f".{DOMAIN}"): name for name in self._addresses()} if self.names_server else {},
            prefix_of=self._prefixes,
            logs=self.logs,
            trust=self.access.context,
        )
        self._started = True
        self.suite.__enter__()

    def _flags(self, url: str) -> Mapping[str, Sequence[str]]:
        flags: dict[str, Sequence[str]] = {}
        for name, picker in self._pickers.items():
            flags[name] = (
                *("--redis-url", url, "--picker-listen", picker, "--picker-notice-s", "1", "--drain-s", "5"),
                *self._broken.router_flags,
            )
        decoding = [f"worker-{number}" for number in range(self.topology.workers)]
        for name in decoding:  # what a picker names; nothing listens there
            flags[name] = ("--http-address", f"{self._host}:{free_port()}")
        for name in ("preprocess", "preprocess-1"):
            flags[name] = ("--drain-s", "5")
        for name in ("postprocess-0", "postprocess-1"):
            flags[name] = ("--drain-s", "5", "--reasoning-parsers", "tiny=think")
        if self.credentials is not None:
            for name in (*flags, "gateway", "gateway-1"):
                flags[name] = (*flags.get(name, ()), *self.credentials.flags(name))
        return flags

    async def open(self) -> Entrances:
        """Opens clients, in place of those that were open."""
        await self.close_clients()
        suite = self.suite
        self.entrances = Entrances(
            list(map(suite.address, suite.gateways)),
            list(map(suite.address, suite.routers)),
            list(self._pickers.values()),
            self.access,
        )
        await self.entrances.connected()
        return self.entrances

    async def close_clients(self) -> None:
        """Closes the connections of all clients."""
        if self.entrances is not None:
            await self.entrances.close()
            self.entrances = None

    @property
    def names(self) -> list[str]:
        """Names of all processes."""
        others = [*([] if self.moving is not None else [REDIS]), *([DNS] if self.names_server is not None else [])]
        return [*others, *self.suite.names]

    def pid(self, name: str) -> int:
        """Returns the process id of one of them."""
        if name == DNS:
            assert self.names_server is not None
            return self.names_server.pid
        return self.redis.pid if name == REDIS else self.suite.pid(name)

    def runs(self, name: str) -> bool:
        """Whether a process has not ended."""
        return psutil.pid_exists(self.pid(name))

    def _own(self, name: str) -> RedisServer | NameServer | None:
        """Returns a process that is not the suite's."""
        return self.redis if name == REDIS else self.names_server if name == DNS else None

    def send_signal(self, name: str, how: signal.Signals) -> None:
        """Sends a signal that does not end a process."""
        os.kill(self.pid(name), how)

    async def end(self, name: str, how: signal.Signals) -> None:
        """Ends a process and waits until it has ended.

        Raises:
            TimeoutError: it has not within 30 s, and is killed.
        """
        if (own := self._own(name)) is not None:
            await asyncio.to_thread(own.end, how)
            return
        self.suite.end(name, how)
        await self.ended(name)

    async def ended(self, name: str, within_s: float = END_S) -> None:
        """Waits until a process has ended by itself.

        Raises:
            TimeoutError: it has not in time, and is killed.
        """
        process = psutil.Process(self.pid(name))
        gone, _ = await asyncio.to_thread(psutil.wait_procs, [process], within_s)
        if self._own(name) is None:
            self.suite.end(name, signal.SIGKILL)
        if not gone:
            process.kill()
            raise TimeoutError(f"{name} has not ended within {within_s:.0f} s")

    async def start_again(self, name: str, tree: Path | None = None) -> None:
        """Starts a process that has ended, of another source tree if there is one."""
        if (own := self._own(name)) is not None:
            await asyncio.to_thread(own.start)
        else:
            await asyncio.to_thread(self.suite.start, name, tree)

    async def whole(self, within_s: float = WHOLE_S) -> None:
        """Waits until every gateway and router has everything.

        Raises:
            TimeoutError: one has not in time.
            AssertionError: a process has ended by itself.
        """
        await until(self._is_whole, within_s, pause_s=0.1)

    async def _is_whole(self) -> bool:
        self.suite.check_live()
        wanted = {"preprocess": 2, "router": 2, "postprocess": 2}
        async with self.access.http(timeout=5) as client:
            for name in self.suite.gateways:
                try:
                    answer = await client.get(self.access.url(f"{self.suite.address(name)}/ready?workers=0"))
                except httpx.TransportError:
                    return False
                state = answer.json()
                services = state.get("services", {})
                if answer.status_code != 200 or state["workers"] < len(self.suite.workers):
                    return False
                if any(services.get(service, 0) < count for service, count in wanted.items()):
                    return False
        return all([await self._lists_all(name) for name in self.suite.routers])

    async def _lists_all(self, router: str) -> bool:
        async with self.access.channel(self.suite.address(router), "router") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            with contextlib.suppress(Exception):
                listed = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5)
                return {worker.worker_id for worker in listed.workers} >= set(self.suite.workers)
        return False

    def close(self) -> None:
        """Ends everything."""
        if self._started:
            self.suite.close()
        self.redis.stop()
        if self.names_server is not None:
            self.names_server.end()
            subprocess.run(["umount", str(Path("/etc/resolv.conf").resolve())], check=False)
        if self.moving is not None:
            self.moving.stop()
