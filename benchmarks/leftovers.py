"""What streams leave behind in the services; after a while it should be nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
import httpx
import psutil

from sluice.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc

GONE_WITHIN_S = 60.0


@dataclass(frozen=True)
class Places:
    """Where to look.

    Attributes:
        gateway: URL.
        postprocess: URL of its metrics.
        router: host:port.
        workers: host:port of each.
        process: of the gateway.
        channel: opens a channel to an address of a service.
    """

    gateway: str
    postprocess: str
    router: str
    workers: tuple[str, ...]
    process: psutil.Process
    channel: Callable[[str, str], grpc.aio.Channel] = lambda address, service: grpc.aio.insecure_channel(address)


def address(process: psutil.Process) -> str:
    """host:port on which a service listens."""
    command = process.cmdline()
    return command[command.index("--listen") + 1]


async def left(places: Places, within_s: float = GONE_WITHIN_S) -> dict[str, float]:
    """By kind, what is still there when nothing more goes away; all zero when nothing leaked."""
    deadline = time.monotonic() + within_s
    while True:
        found = await _look(places)
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


async def _look(places: Places) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        texts = [(await client.get(f"{url}/metrics")).text for url in (places.gateway, places.postprocess)]
    found = {"gateway streams": _gauge(texts[0], "sluice_gateway_live_streams")}
    found["postprocess streams"] = _gauge(texts[1], "sluice_postprocess_streams")
    async with places.channel(places.router, "router") as channel:
        loads = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest())
        found["reservations"] = float(sum(load.requests for load in loads.loads))
    found["worker requests"] = 0.0
    for worker in places.workers:
        async with places.channel(worker, "worker") as channel:
            info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest())
            found["worker requests"] += info.load.running_requests + info.load.waiting_requests
    port = int(places.gateway.rpartition(":")[2])
    served = [one for one in places.process.net_connections("tcp") if one.laddr.port == port and one.raddr]
    found["connections"] = float(len(served))
    return found


def _gauge(text: str, name: str) -> float:
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found)) if found else -1.0


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By service, MiB of resident memory that were not there before."""
    return {name: round((after[name] - before[name]) / 2**20, 1) for name in before}
