"""What a suite still holds when nothing runs: reservations, streams, open files, keys of Redis, memory."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import filterfalse

import httpx
import psutil
from redis import Redis

from sluice.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.faults.place import REDIS, Place

MIB = 1 << 20
LEFT_S = 60.0
"""Until nothing is left; routers release after 30 s what their workers do not have."""
MAX_FILES = 16
"""Files that a process may have opened for good: pools of connections to Redis, channels to a peer that returned."""
_LIVE = re.compile(r"^sluice_gateway_live_streams(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_MOVES = re.compile(
    r'^sluice_gateway_(?:migrations_total\{[^}]*outcome="moved"|text_moves_total\{)[^}]*\} (\S+)$', re.MULTILINE
)
_KEPT = re.compile(rb":blocks:|:session:|:clock$|:pin$")
"""Keys that are there to stay: of what workers have cached, of a clock that has moved, and of a model's name."""
_VARYING = re.compile(r"\d{6,}|[0-9a-f]{8,}")


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is there.

    Attributes:
        files, memory: by name and process id.
        keys: names in Redis, without ids and numbers.
    """

    files: Mapping[tuple[str, int], int]
    memory: Mapping[tuple[str, int], int]
    keys: Mapping[str, int]


@dataclass(slots=True)
class Left:
    """What is there too much after a fault.

    Attributes:
        reservations: at the router that has most of them.
        streams: of gateways.
        running: requests at workers.
        files: that the process that opened most has more than before; those that were started since do not count.
        keys: kinds of keys in Redis of which there are more than before, with the number.
        memory_mib: growth of the process that grew most.
        errors: what could not be counted.
    """

    reservations: int = 0
    streams: int = 0
    running: int = 0
    files: int = 0
    keys: Mapping[str, int] | None = None
    memory_mib: float = 0.0
    errors: str = ""

    @property
    def nothing(self) -> bool:
        """Whether nothing is left but memory."""
        return not (self.reservations or self.streams or self.running or self.keys or self.errors) and (
            self.files <= MAX_FILES
        )


async def inventory(place: Place) -> Inventory:
    """Counts what processes and Redis have."""
    files, memory = {}, {}
    for name in place.names:
        process = psutil.Process(place.pid(name))
        files[name, process.pid] = process.num_fds()
        memory[name, process.pid] = process.memory_info().rss
    return Inventory(files, memory, await asyncio.to_thread(_keys, place))


def _keys(place: Place) -> Mapping[str, int]:
    """Returns the number of keys and entries of each kind."""
    if place.moving is not None:
        host, port = "127.0.0.1", place.moving.master().port
    else:
        host, port = place.redis.host, place.redis.port
    counts: dict[str, int] = {}
    with Redis(host=host, port=port, protocol=2) as client:
        for key in filterfalse(_KEPT.search, client.keys("*")):
            kind = _VARYING.sub("*", key.decode(errors="replace"))
            counts[kind] = counts.get(kind, 0) + 1
    return counts


async def moves_of(place: Place) -> Mapping[tuple[str, int], int]:
    """Returns how many generations and texts each gateway moved, by name and process id."""
    found = {}
    async with place.access.http(timeout=10) as client:
        for name in place.suite.gateways:
            try:
                metrics = (await client.get(place.access.url(f"{place.suite.address(name)}/metrics"))).text
            except httpx.TransportError:
                continue
            found[name, place.pid(name)] = int(sum(map(float, _MOVES.findall(metrics))))
    return found


async def left(place: Place, before: Inventory, within_s: float = LEFT_S) -> Left:
    """Waits until nothing is left; returns what still is when the time is over."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            found = await _left(place, before)
        except Exception as error:
            found = Left(errors=f"{type(error).__name__}: {' '.join(str(error).split())}")
        if found.nothing or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


async def _left(place: Place, before: Inventory) -> Left:
    found = Left()
    suite = place.suite
    async with place.access.http(timeout=10) as client:
        for name in suite.gateways:
            live = _LIVE.search((await client.get(place.access.url(f"{suite.address(name)}/metrics"))).text)
            assert live is not None, f"{name} does not say how many streams it has"
            found.streams += int(float(live[1]))
    for name in suite.routers:
        async with place.access.channel(suite.address(name), "router") as channel:
            loads = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest(), timeout=10)
            found.reservations = max(found.reservations, sum(load.requests for load in loads.loads))
    for name in suite.workers:
        async with place.access.channel(suite.address(name), "worker") as channel:
            info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
            found.running += info.load.running_requests + info.load.waiting_requests
    now = await inventory(place)
    kept = now.files.keys() & before.files.keys()
    found.files = max([0, *(now.files[key] - before.files[key] for key in kept if key[0] != REDIS)])
    grown = [now.memory[key] - before.memory[key] for key in kept]
    found.memory_mib = max([0, *grown]) / MIB
    found.keys = {
        kind: count - before.keys.get(kind, 0) for kind, count in now.keys.items() if count > before.keys.get(kind, 0)
    }
    return found
