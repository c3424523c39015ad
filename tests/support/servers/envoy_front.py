"""A real Envoy in front of endpoints, with pickers that are processes of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.common.net.ports import free_port
from sluice.v1 import router_pb2
from tests.support.servers.envoy import Envoy
from tests.support.servers.http_upstream import Upstream, digest
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_child import RouterChild
from tests.support.servers.router_cluster import MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

VERSIONS = ("1.40.0", "1.36.4")


def chat(text: str, **fields: Any) -> bytes:
    """Returns the body of a chat."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}).encode()


@dataclass(frozen=True)
class Answer:
    """What a client received."""

    status: int
    endpoint: str
    right: bool
    text: str


class Front:
    """Envoy, the picker processes behind it, a router that the workers are attached to, and the endpoints."""

    def __init__(
        self, envoy: Envoy, pickers: list[RouterChild], router: RouterProcess, upstreams: list[Upstream]
    ) -> None:
        self.envoy = envoy
        self.pickers = pickers
        self.router = router
        self.upstreams = upstreams
        limits = httpx.Limits(max_connections=200)
        self.client = httpx.AsyncClient(base_url=envoy.url, timeout=60, limits=limits)

    @property
    def endpoints(self) -> list[str]:
        """host:port of all endpoints."""
        return [each.served.endpoint for each in self.upstreams]

    async def ask(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        """Sends a request and checks its answer: whole, and about this very body."""
        answer = await self.client.post(path, content=body, headers={**headers, "content-type": "application/json"})
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        if answer.status_code != 200 or not events:
            return Answer(answer.status_code, "", False, answer.text)
        first = json.loads(events[0])
        right = (
            events[-1] == "[DONE]" and len(events) == self.upstreams[0].chunks + 2 and first["digest"] == digest(body)
        )
        return Answer(200, first["endpoint"], right, answer.text)

    async def bookings(self) -> int:
        """Requests booked, over all pickers."""
        loads = (await self.router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
        return sum(load.requests for load in loads)

    async def empty(self) -> None:
        """Waits until nothing is booked."""

        async def nothing() -> bool:
            return not await self.bookings()

        await until(nothing)


@asynccontextmanager
async def front(
    folder: Path,
    redis: RedisServer,
    flags: Sequence[str] = (),
    count: int = 3,
    pickers: int = 1,
    upstream: Upstream | None = None,
    **envoy: Any,
) -> AsyncIterator[Front]:
    """Starts everything, and waits until Envoy's first request has gone through.

    Args:
        flags: of the pickers' command line.
        count: number of endpoints.
    """
    shape = upstream or Upstream()
    upstreams = [Upstream(shape.hold_s, shape.chunks, shape.chunk_s) for _ in range(count)]
    for each in upstreams:
        await each.start()
    shared = ["--redis-url", redis.url, "--picker-notice-s", "0", *flags]
    children: list[RouterChild] = []
    async with routers(redis_url=redis.url) as [router]:
        await router.ready()
        workers = []
        for number, each in enumerate(upstreams):
            worker = FakeWorker(f"w{number}")
            worker.registration.http_address = each.served.endpoint
            await worker.attach(router)
            worker.keep_beating()
            workers.append(worker)
        listens = [f"127.0.0.1:{free_port()}" for _ in range(pickers)]
        children += [RouterChild(folder, *shared, "--picker-listen", each, "--drain-s", "1") for each in listens]
        started = Envoy(folder, listens, [each.served.endpoint for each in upstreams], **envoy)
        try:
            await asyncio.gather(*(child.start() for child in children))
            await asyncio.to_thread(started.start)
            found = Front(started, children, router, upstreams)

            async def answers() -> bool:
                return (await found.ask(chat("first"))).right

            await until(answers)
            await found.empty()
            yield found
            await found.client.aclose()
        finally:
            await asyncio.to_thread(started.stop)
            for child in children:
                await child.stop()
            for worker in workers:
                await worker.detach()
            for each in upstreams:
                await each.stop()
