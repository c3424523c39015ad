"""A router with an endpoint picker, and workers with HTTP servers, as tests of the picker use them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2
from tests.support.clients.ext_proc import Answered, Exchange
from tests.support.servers.preprocess_server import preprocess
from tests.support.servers.router_cluster import MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

NAMES = ("a", "b", "c")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Which way does the river run?"}]}


def http(number: int) -> str:
    return f"192.168.1.{number}:8000"


class Picker:
    """A router with a picker, and workers a, b and c with HTTP servers at 192.168.1.1 to .3."""

    def __init__(
        self, router: RouterProcess, channel: grpc.aio.Channel, workers: list[FakeWorker], health: str
    ) -> None:
        self.health = health
        self.router = router
        self.channel = channel
        self.workers = workers

    def exchange(self) -> Exchange:
        return Exchange(self.channel)

    async def pick(self, body: Any, *args: Any, **kwargs: Any) -> Answered:
        """The answer to one request, whose stream is then broken off."""
        exchange = self.exchange()
        answered = await exchange.request(body, *args, **kwargs)
        exchange.cut()
        return answered

    async def bookings(self) -> dict[str, tuple[int, float]]:
        """Requests and prefill blocks booked by worker."""
        loads = (await self.router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
        return {load.worker_id: (load.requests, load.prefill_blocks) for load in loads if load.requests}

    async def empty(self) -> None:
        """Waits until nothing is booked."""

        async def nothing() -> bool:
            return not await self.bookings()

        await until(nothing)


@asynccontextmanager
async def picker(names: tuple[str, ...] = NAMES, **settings: Any) -> AsyncIterator[Picker]:
    ports = free_port(), free_port()
    settings = {"picker_listen": f"127.0.0.1:{ports[0]}", "drain_s": 1, "picker_notice_s": 0, **settings}
    if "picker_health_listen" in settings:
        settings["picker_health_listen"] = f"127.0.0.1:{ports[1]}"
    async with routers(**settings) as [router]:
        await router.ready()
        workers = []
        for number, name in enumerate(names, 1):
            worker = FakeWorker(name)
            worker.registration.http_address = http(number)
            await worker.attach(router)
            worker.keep_beating()
            workers.append(worker)
        channel = open_channel(settings["picker_listen"])
        try:
            yield Picker(router, channel, workers, settings.get("picker_health_listen", ""))
        finally:
            for worker in workers:
                await worker.detach()
            await channel.close()


@asynccontextmanager
async def tokenizing_picker(**settings: Any) -> AsyncIterator[Picker]:
    async with preprocess() as address, picker(preprocess=[address], **settings) as found:

        async def tokenizes() -> bool:
            exchange = found.exchange()
            await exchange.request(CHAT)
            headers, _ = await exchange.respond([b"{}"])
            return "x-sluice-degraded" not in headers

        await until(tokenizes)
        await found.empty()
        yield found
