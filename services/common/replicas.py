"""Client-side balancing over the replicas of a service.

One HTTP/2 connection pins to one replica, so each replica gets a channel of its own: names are resolved again and
again, each replica's health is watched, and every call goes to a healthy replica with the fewest calls under way.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import telemetry
from services.common.channels import open_channel
from services.common.errors import ErrorKind, SluiceError, unavailable
from services.common.grpc_errors import from_rpc_error
from services.common.tasks import TaskOwner

log = logging.getLogger(__name__)

RESOLVE_EVERY_S = 2.0
WATCH_RETRY_S = 0.5

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")


class Replica(Generic[S]):
    """One process of a service: its address, its stub, and whether it takes requests."""

    def __init__(self, address: str, channel: grpc.aio.Channel, stub: S) -> None:
        self.address = address
        self.channel = channel
        self.stub = stub
        self.serving = False
        self.outstanding = 0


class ReplicaSet(Generic[S]):
    """The replicas behind a list of targets.

    Args:
        peer: the service's name, for messages, such as ``preprocess``.
        targets: host:port each; a name stands for every address it resolves to.
        make_stub: makes the service's stub on a channel.
        on_change: called after a replica came up or went down.
        token: gives the bearer token that every call shows; None shows none.
    """

    def __init__(
        self,
        peer: str,
        targets: Sequence[str],
        make_stub: Callable[[grpc.aio.Channel], S],
        credentials: grpc.ChannelCredentials | None = None,
        on_change: Callable[[], None] | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        self.peer = peer
        self._targets = targets
        self._make_stub = make_stub
        self._credentials = credentials
        self._token = token
        self._on_change = on_change or (lambda: None)
        self._replicas: dict[str, Replica[S]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskOwner()

    @property
    def serving(self) -> list[Replica[S]]:
        """Replicas that take requests now."""
        return [replica for replica in self._replicas.values() if replica.serving]

    async def start(self) -> None:
        """Resolves once, then keeps resolving and watching until closed."""
        await self._resolve_all()
        self._tasks.spawn(self._keep_resolving(), f"{self.peer}-resolve")

    async def close(self) -> None:
        """Stops watching and closes every channel."""
        await self._tasks.close()
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.channel.close() for replica in replicas))

    async def wait_ready(self, timeout_s: float) -> bool:
        """Waits until a replica serves; False when none does in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.serving:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def pick(self, exclude: frozenset[str] = frozenset()) -> Replica[S]:
        """The healthy replica with the fewest calls under way; SluiceError(UNAVAILABLE) when there is none."""
        candidates = [replica for replica in self.serving if replica.address not in exclude]
        if not candidates:
            raise unavailable(f"No {self.peer} replica is ready.", code="service_unavailable")
        if len(candidates) == 1:
            return candidates[0]
        fewest = min(replica.outstanding for replica in candidates)
        return random.choice([replica for replica in candidates if replica.outstanding == fewest])

    async def call(
        self,
        method: Callable[[S], Callable[..., Awaitable[A]]],
        request: Any,
        timeout_s: float,
        attempts: int = 2,
    ) -> A:
        """One idempotent unary call; when a replica cannot be reached, another one is tried within the same deadline.

        Raises:
            SluiceError: as the service said, or UNAVAILABLE / DEADLINE_EXCEEDED of its own.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        tried: frozenset[str] = frozenset()
        while True:
            replica = self.pick(tried)
            tried |= {replica.address}
            replica.outstanding += 1
            try:
                return await method(replica.stub)(
                    request, timeout=max(deadline - loop.time(), 0.001), metadata=telemetry.grpc_metadata()
                )
            except grpc.aio.AioRpcError as error:
                cause = from_rpc_error(error, self.peer)
                elsewhere = cause.retryable and len(tried) < attempts and loop.time() < deadline
                if not elsewhere or not any(other.address not in tried for other in self.serving):
                    raise cause from error
                log.warning("retrying on another replica", extra={"peer": self.peer, "failed": replica.address})
            finally:
                replica.outstanding -= 1

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            await self._resolve_all()

    async def _resolve_all(self) -> None:
        answers = await asyncio.gather(*(_resolve(target) for target in self._targets))
        found = dict(pair for answer in answers for pair in answer)
        if not found:
            return  # the name service is away: what we know may still be true
        for address in found.keys() - self._replicas.keys():
            self._add(address, found[address])
        for address in self._replicas.keys() - found.keys():
            # Not in the name service any more. While it still answers it only gets no new requests, because a name
            # service that is restarting may answer in part.
            if not self._replicas[address].serving:
                await self._remove(address)

    def _add(self, address: str, name: str) -> None:
        channel = open_channel(address, self._credentials, name, self._token)
        replica = Replica(address, channel, self._make_stub(channel))
        self._replicas[address] = replica
        self._watches[address] = self._tasks.spawn(self._watch(replica), f"{self.peer}-watch-{address}")

    async def _remove(self, address: str) -> None:
        replica = self._replicas.pop(address)
        self._watches.pop(address).cancel()
        self._mark(replica, False)
        await replica.channel.close()

    def _mark(self, replica: Replica[S], serving: bool) -> None:
        if replica.serving == serving:
            return
        replica.serving = serving
        log.info("replica is %s", "up" if serving else "down", extra={"peer": self.peer, "address": replica.address})
        self._on_change()

    async def _watch(self, replica: Replica[S]) -> None:
        health = health_pb2_grpc.HealthStub(replica.channel)
        while True:
            try:
                async for answer in health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=False):
                    self._mark(replica, answer.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError as error:
                log.debug("health watch ended", extra={"peer": self.peer, "status": error.code().name})
            self._mark(replica, False)
            await asyncio.sleep(WATCH_RETRY_S * random.uniform(0.5, 1.5))


async def _resolve(target: str) -> list[tuple[str, str]]:
    """(ip:port, certificate name) of every address behind host:port; empty when the name is not known now."""
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit():
        raise SluiceError(ErrorKind.INVALID_ARGUMENT, f"{target!r} is no host:port.")
    host = host.strip("[]")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(f"[{info[4][0]}]:{port}" if ":" in str(info[4][0]) else f"{info[4][0]}:{port}", host) for info in infos]
