"""Requests that reserve at routers all the time, and what then should be reserved in their Redis."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from sluice.v1 import router_pb2
from tests.support.clients.callers import prompt, query
from tests.support.servers.redis_topologies import ask
from tests.support.servers.router_cluster import FakeWorker, HasStub

HELD_S = (0.02, 0.2)  # shortest and longest time between a reservation and its end
TOKENS = list(range(320))
_STORED = (
    "local found, held = {}, redis.call('HGETALL', KEYS[1]) "
    "for at = 1, #held, 2 do found[#found + 1] = held[at] found[#found + 1] = cmsgpack.unpack(held[at + 1]).w end "
    "return found"
)


class Differences(NamedTuple):
    """How the reservations of a Redis differ from the requests that run."""

    lost: set[str]  # they run, and have no reservation, or one on another worker
    doubled: set[str]  # they have a reservation, and do not run
    miscounted: int  # requests counted on workers, less the reservations

    @property
    def none(self) -> bool:
        """Whether they are equal."""
        return not (self.lost or self.doubled or self.miscounted)


class ReservationLoad:
    """Keeps a number of requests running, each reserved at a random router and freed at a random one.

    Args:
        routers: replicas.
        tag: hash tag of the model in Redis.
        at_once: number of requests.
    """

    def __init__(self, routers: Sequence[HasStub], tag: str, at_once: int = 8) -> None:
        self._routers = routers
        self._tag = tag
        self._at_once = at_once
        self._numbers = itertools.count()
        self.running: dict[str, str] = {}
        """Worker by request id."""
        self.failed: list[str] = []
        self.routed = 0
        self.degraded = 0
        self._whole: list[float] = []
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Sends requests until `stop`, after which the last ones still run."""
        await asyncio.gather(*(self._one_after_the_other() for _ in range(self._at_once)))

    def stop(self) -> None:
        """Lets `run` return once each place has a running request."""
        self._stopping.set()

    async def _one_after_the_other(self) -> None:
        while True:
            request_id = f"r{next(self._numbers)}"
            began = time.monotonic()
            reservation = await self._reserve(request_id, began)
            if self._stopping.is_set() and reservation:
                return
            await asyncio.sleep(random.uniform(*HELD_S))
            if reservation:
                await self._free(request_id, reservation)

    async def _reserve(self, request_id: str, began: float) -> str:
        try:
            answer = await self._router().stub.RouteQuery(query(prompt(*TOKENS), request_id), timeout=30)
        except grpc.aio.AioRpcError as error:
            self.failed.append(f"{request_id}: {error.code().name} {error.details()}")
            return ""
        self.running[request_id] = answer.decode.worker_id
        self.routed += 1
        if answer.degraded:
            self.degraded += 1
        else:
            self._whole.append(began)
        return str(answer.reservation_id)

    async def _free(self, request_id: str, reservation: str) -> None:
        self.running.pop(request_id)
        # As gateways do: one router frees the reservation, all hear that the request ended.
        outcomes = [router_pb2.RequestOutcome(reservation_id=reservation, output_tokens=1)]
        frees = self._router()
        try:
            for router in self._routers:
                ids = [reservation] if router is frees else []
                await router.stub.FreeRequest(
                    router_pb2.FreeRequestRequest(reservation_ids=ids, outcomes=outcomes), timeout=30
                )
        except grpc.aio.AioRpcError as error:
            self.failed.append(f"{request_id} free: {error.code().name} {error.details()}")

    def _router(self) -> HasStub:
        return random.choice(self._routers)

    def whole_after(self, since: float) -> float | None:
        """Returns when the first request was sent after a time that was answered without `degraded`."""
        return next((at for at in self._whole if at >= since), None)

    def differences(self, port: int) -> Differences:
        """Compares the reservations at a server with the running requests, which must not change meanwhile."""
        flat = [part.decode() for part in ask(port, "EVAL", _STORED, 1, f"{self._tag}:reservations")]
        stored = dict(zip(flat[::2], flat[1::2], strict=True))
        counts = ask(port, "HVALS", f"{self._tag}:requests")
        return Differences(
            {name for name, worker in self.running.items() if stored.get(name) != worker},
            set(stored) - set(self.running),
            sum(map(int, counts)) - len(stored),
        )

    async def settled(self, port: Any, within_s: float = 15.0) -> Differences:
        """Waits until the reservations are those of the running requests, and returns the last differences.

        Args:
            port: returns the port of the master.
        """
        deadline = time.monotonic() + within_s
        while True:
            found = await asyncio.to_thread(lambda: self.differences(port()))
            if found.none or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)


async def attach_workers(routers: Sequence[HasStub], count: int = 4) -> list[FakeWorker]:
    """Attaches workers, which keep sending heartbeats, to the routers in turn."""
    workers = [FakeWorker(f"w{number}") for number in range(count)]
    for number, worker in enumerate(workers):
        await worker.attach(routers[number % len(routers)])
        worker.keep_beating()
    return workers
