"""Client-side load balancing over the replicas of a service.

An HTTP/2 connection is pinned to one replica, so each replica gets its own channel: names are re-resolved periodically,
each replica's health is watched, and every call goes to the healthy replica with the fewest calls in progress.

A replica that reports healthy but does not respond is excluded by its circuit breaker. A call that was refused, or lost
with its replica, is retried on another; one that takes unusually long may be hedged. Calls that were not refused may
have been processed, so repeating them draws on a budget: failures must not double the load.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.errors import ErrorKind, SluiceError, no_answer
from services.common.base.tasks import TaskOwner, asked_to_end, end_all
from services.common.net.addresses import host_port, join
from services.common.observability import telemetry
from services.common.rpc.breaker import Breaker, LatencyQuantile, RetryBudget
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error, is_typed, late_answer, passed_on
from services.common.rpc.multiplexed_call import MultiplexedCall

log = logging.getLogger(__name__)

RESOLVE_EVERY_S = 2.0
WATCH_RETRY_S = 0.5
RETRIES_PER_CALL, RETRY_BURST = 0.2, 100.0
HEDGES_PER_CALL, HEDGE_BURST = 0.05, 10.0
HEDGE_FLOOR_S = 0.02
HEDGE_GUESS_S = 0.5
PATIENCE_S = 1.0
"""A timeout after waiting less than this does not count against the replica."""

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")
T = TypeVar("T")


class Replica(Generic[S]):
    """One process of a service: its address, its stub, and whether it accepts requests.

    Attributes:
        held: the channel is in use elsewhere; it stays open, and the replica listed, until that ends.
    """

    def __init__(
        self, address: str, channel: grpc.aio.Channel, stub: S, shared: MultiplexedCall[Any, Any] | None = None
    ) -> None:
        self.address = address
        self.channel = channel
        self.stub = stub
        self.shared = shared
        self.serving = False
        self.outstanding = 0
        self.held = False
        self.breaker = Breaker()


class ReplicaSet(Generic[S]):
    """The replicas behind a list of targets.

    Args:
        peer: the service's name, such as ``preprocess``, used in messages and to select the token sent to its replicas.
        targets: host:port each; a name stands for every address it resolves to.
        make_stub: creates the service's stub on a channel.
        on_change: called after a replica came up or went down.
        shared: returns the MultiplexedCall of a stub, if one of its RPCs has one.
        on_event: called with each mitigation: "retry", "hedge", "hedge_won", "circuit_opened", "circuit_refused".
    """

    def __init__(
        self,
        peer: str,
        targets: Sequence[str],
        make_stub: Callable[[grpc.aio.Channel], S],
        credentials: grpc.ChannelCredentials | None = None,
        on_change: Callable[[], None] | None = None,
        shared: Callable[[S], MultiplexedCall[Any, Any]] | None = None,
        on_event: Callable[[str], None] = lambda event: None,
    ) -> None:
        self.peer = peer
        self._targets = targets
        self._make_stub = make_stub
        self._credentials = credentials
        self._shared = shared
        self._on_event = on_event
        self._on_change = on_change or (lambda: None)
        self._replicas: dict[str, Replica[S]] = {}
        self._unresolved: list[str] = []
        self._watches: dict[str, list[asyncio.Task[None]]] = {}
        self._tasks = TaskOwner()
        self._retries = RetryBudget(RETRIES_PER_CALL, RETRY_BURST)
        self._hedges = RetryBudget(HEDGES_PER_CALL, HEDGE_BURST)
        self._latencies: dict[str, LatencyQuantile] = {}

    @property
    def serving(self) -> list[Replica[S]]:
        """Replicas that accept requests now."""
        return [replica for replica in self._replicas.values() if replica.serving]

    @property
    def away(self) -> list[str]:
        """Addresses that should accept requests but do not, and names that do not resolve."""
        not_serving = [replica.address for replica in self._replicas.values() if not replica.serving]
        return sorted({*not_serving, *self._unresolved})

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
        """Waits until a replica serves; returns False on timeout."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.serving:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def pick(self, exclude: frozenset[str] = frozenset(), prefer: S | None = None) -> Replica[S]:
        """Returns the healthy replica with the fewest calls in progress.

        Args:
            exclude: addresses of replicas that are not returned.
            prefer: stub of the replica that is returned if it is healthy.

        Raises:
            SluiceError: UNAVAILABLE when none is ready, or when all have stopped responding (`circuit_open`).
        """
        candidates = [
            replica for replica in self._replicas.values() if replica.serving and replica.address not in exclude
        ]
        if not candidates:
            raise no_answer(f"No {self.peer} replica is ready; retry shortly.")
        passable = [replica for replica in candidates if replica.breaker.passable]
        if not passable:
            self._on_event("circuit_refused")
            wait_ms = int(1000 * min(replica.breaker.retry_after_s for replica in candidates))
            raise no_answer(
                f"The {self.peer} service does not respond; retry shortly.",
                code="circuit_open",
                retry_after_ms=max(wait_ms, 1000),
            )
        if len(passable) == 1:
            return passable[0]
        if prefer is not None:
            for replica in passable:
                if replica.stub is prefer:
                    return replica
        chosen = idlest(passable, lambda replica: replica.outstanding)
        assert chosen is not None
        return chosen

    async def call(
        self,
        method: Callable[[S], Callable[..., Awaitable[A]]],
        request: Any,
        timeout_s: float,
        attempts: int = 2,
        hedge: str = "",
        waits: bool = False,
        prefer: S | None = None,
    ) -> A:
        """Makes an idempotent unary call; if a replica is unreachable, retries on another before the deadline.

        Args:
            hedge: name of a group of calls of similar duration; a call slower than 95 of 100 of them is also sent
                to a second replica, and the first response wins. Empty: never.
            waits: the service waits for others in this call, so that a timeout does not count against the replica.
            prefer: stub of the replica that is called first if it is healthy; without `hedge`.

        Raises:
            SluiceError: the service's error, or UNAVAILABLE / DEADLINE_EXCEEDED of the client.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._retries.earn()
        tried: list[str] = []
        while True:
            try:
                if hedge and len(self._replicas) > 1 and len(self.serving) > len(tried) + 1:
                    return await self._hedged(method, request, deadline, tried, hedge)
                return await self._once(method, request, deadline, tried, waits, prefer)
            except SluiceError as cause:
                elsewhere = any(other.address not in tried and other.breaker.passable for other in self.serving)
                retryable = cause.retryable and tried and len(tried) < attempts and loop.time() < deadline and elsewhere
                if not retryable or not (_refused(cause) or self._retries.spend()):
                    raise
                self._on_event("retry")
                log.warning("retrying on another replica", extra={"peer": self.peer, "failed": tried})

    async def _once(
        self,
        method: Callable[[S], Callable[..., Awaitable[A]]],
        request: Any,
        deadline: float,
        tried: list[str],
        waits: bool = False,
        prefer: S | None = None,
    ) -> A:
        """Makes the call on one replica, which is added to `tried`; raises SluiceError."""
        loop = asyncio.get_running_loop()
        replica = self.pick(frozenset(tried), prefer)
        tried.append(replica.address)
        replica.outstanding += 1
        replica.breaker.try_pass()
        left_s = max(deadline - loop.time(), 0.001)
        try:
            answer = await method(replica.stub)(request, timeout=left_s, metadata=telemetry.grpc_metadata())
        except grpc.aio.AioRpcError as error:
            late = loop.time() >= deadline
            self._update_breaker(replica, error, 0.0 if waits else left_s, late)
            raise self._cause(error, late) from error
        except asyncio.CancelledError:
            if asked_to_end():
                raise
            # The replica's channel was closed.
            raise no_answer(f"The {self.peer} replica was removed before it responded.") from None
        else:
            replica.breaker.succeeded()
            return answer
        finally:
            replica.outstanding -= 1

    def _cause(self, error: grpc.aio.AioRpcError, late: bool) -> SluiceError:
        if error.code() is grpc.StatusCode.CANCELLED and not is_typed(error):
            # Not cancelled by this caller. The server may detect the expired deadline first when this process is busy;
            # otherwise the call arrived while the server was stopping.
            if late:
                return late_answer(self.peer)
            return no_answer(f"The {self.peer} service stopped before it responded.")
        return passed_on(from_rpc_error(error, self.peer), f"{self.peer} service")

    def _update_breaker(self, replica: Replica[S], error: grpc.aio.AioRpcError, waited_s: float, late: bool) -> None:
        """Counts a typed refusal as a success; timeouts and broken connections are failures."""
        if is_typed(error):
            replica.breaker.succeeded()
        elif not (late or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED) or waited_s >= PATIENCE_S:
            self._failed(replica)

    def _failed(self, replica: Replica[S]) -> None:
        if replica.breaker.failed():
            self._on_event("circuit_opened")
            log.warning("replica does not respond", extra={"peer": self.peer, "address": replica.address})

    async def _hedged(
        self,
        method: Callable[[S], Callable[..., Awaitable[A]]],
        request: Any,
        deadline: float,
        tried: list[str],
        name: str,
    ) -> A:
        """Makes the call on one replica and, when it is unusually slow, on a second; the first response wins."""
        latency = self._latencies.setdefault(name, LatencyQuantile(HEDGE_FLOOR_S, HEDGE_GUESS_S))
        self._hedges.earn()
        started = perf_counter()
        calls: list[asyncio.Future[A]] = [asyncio.ensure_future(self._once(method, request, deadline, tried))]
        try:
            await asyncio.wait(calls, timeout=latency.seconds)
            latency.saw(perf_counter() - started)
            if not calls[0].done() and self._hedges.spend():
                self._on_event("hedge")
                calls.append(asyncio.ensure_future(self._once(method, request, deadline, tried)))
            first = calls.index(await _first_response(calls))
            if first > 0:
                self._on_event("hedge_won")
                if (slow := self._replicas.get(tried[0])) is not None:
                    self._failed(slow)  # repeated hedge losses open the breaker of a hanging replica
            return calls[first].result()
        finally:
            await end_all(calls)
            calls.clear()  # break the reference cycle: their exceptions' tracebacks reference this frame

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            await self._resolve_all()

    async def _resolve_all(self) -> None:
        results = await asyncio.gather(*(_resolve(target) for target in self._targets))
        self._unresolved = [target for target, pairs in zip(self._targets, results, strict=True) if not pairs]
        resolved = dict(pair for pairs in results for pair in pairs)
        if not resolved:
            return  # the name service is unavailable: keep the known replicas
        for address in resolved.keys() - self._replicas.keys():
            self._add(address, resolved[address])
        for address in self._replicas.keys() - resolved.keys():
            # No longer in the name service. Keep it while it serves, because a restarting name service may return
            # partial results.
            replica = self._replicas[address]
            if not (replica.serving or replica.held or replica.outstanding):
                await self._remove(address)

    def _add(self, address: str, name: str) -> None:
        channel = open_channel(address, self._credentials, name, callee=self.peer)
        stub = self._make_stub(channel)
        replica = Replica(address, channel, stub, None if self._shared is None else self._shared(stub))
        self._replicas[address] = replica
        self._watches[address] = [self._tasks.spawn(self._watch(replica), f"{self.peer}-watch-{address}")]
        if replica.shared is not None:
            self._watches[address].append(self._tasks.spawn(replica.shared.run(), f"{self.peer}-calls-{address}"))

    async def _remove(self, address: str) -> None:
        replica = self._replicas.pop(address)
        for task in self._watches.pop(address):
            task.cancel()
        self._mark(replica, False)
        await replica.channel.close()

    def _mark(self, replica: Replica[S], serving: bool) -> None:
        if replica.serving == serving:
            return
        replica.serving = serving
        if replica.shared is not None:
            replica.shared.welcome(serving)
        log.info("replica is %s", "up" if serving else "down", extra={"peer": self.peer, "address": replica.address})
        self._on_change()

    async def _watch(self, replica: Replica[S]) -> None:
        health = health_pb2_grpc.HealthStub(replica.channel)
        while True:
            serving = False
            try:
                async for answer in health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=False):
                    self._mark(replica, answer.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError as error:
                log.debug("health watch ended", extra={"peer": self.peer, "status": error.code().name})
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # too many watchers: poll instead
                    serving = await _serves(health)
            self._mark(replica, serving)
            await asyncio.sleep(WATCH_RETRY_S * random.uniform(0.5, 1.5))


async def _serves(health: health_pb2_grpc.HealthAsyncStub) -> bool:
    try:
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _refused(cause: SluiceError) -> bool:
    """Whether the service rejected the call before doing any work."""
    error = cause.__cause__
    return isinstance(error, grpc.aio.AioRpcError) and is_typed(error)


async def _first_response(calls: Sequence[asyncio.Future[A]]) -> asyncio.Future[A]:
    """Returns the first call that succeeds or fails permanently; if all fail transiently, the first one made."""
    pending = set(calls)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for call in done:
            failure = call.exception()
            if failure is None or not (isinstance(failure, SluiceError) and failure.retryable):
                return call
    return calls[0]


async def _resolve(target: str) -> list[tuple[str, str]]:
    """Returns (ip:port, certificate name) for each address behind host:port; empty when it does not resolve."""
    if (parsed := host_port(target)) is None:
        raise SluiceError(ErrorKind.INVALID_ARGUMENT, f"{target!r} is not host:port.")
    host, port = parsed
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(join(str(info[4][0]), port), host) for info in infos]


def idlest(candidates: Iterable[T], load: Callable[[T], int]) -> T | None:
    """Returns a random one of the candidates with the least load; None when there are none.

    A fixed choice among equals would send every lightly loaded caller to the same candidate.
    """
    items = list(candidates)
    if len(items) < 2:
        return items[0] if items else None
    lowest = min(map(load, items))
    return random.choice([candidate for candidate in items if load(candidate) == lowest])
