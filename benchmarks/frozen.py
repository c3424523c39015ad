"""How long who waits for a process takes to notice that it has stopped: `python benchmarks/frozen.py`.

Starts two of every service but the gateway, with routers on a Redis of their own, and stops (SIGSTOP) one process after
the other while streams run and new requests arrive. Prints a table in Markdown: the process, who waits for it, and the
seconds from the signal until it was replaced, or what it held was released. The exit code is 1 when one took longer
than 15 s, or a request failed, but for the one that a stopped template process
ran. `--only NAME` measures one process, such as `worker`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.session_peer import (
    seconds_until_stopped_client_is_lost,
    seconds_until_stopped_server_is_lost,
)

DOCUMENTED_S = 15.0
STREAMS, NEW = 8, 16
TOKENS, NEW_TOKENS = 2_500, 4
STEP_MS = 20
RUNNING_S = 2.0
GIVE_UP_S = 100.0
POLL_S = 0.1
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
FOREIGN = (
    "import runpy, sys, services.worker.serving.wire as wire; wire.MIN_PING_INTERVAL_MS = 0; sys.argv.pop(0);"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


@dataclass
class Rows:
    """The table, and what went wrong."""

    late: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, stopped: str, waits: str, happens: str, seconds: float, limit_s: float = DOCUMENTED_S) -> None:
        """Adds and prints a row."""
        if seconds > limit_s:
            self.late.append(f"{stopped}, {waits}: {seconds:.1f} s")
        print(f"| {stopped} | {waits} | {happens} | {seconds:.1f} |", flush=True)


def _chat(number: int, tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me of number {number}."}]
    return {"model": "tiny", "messages": messages, "max_tokens": tokens, "ignore_eos": True, **fields}


class Streams:
    """Streams that run until cancelled, and when each last received something."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}
        self.failed: list[str] = []

    async def run(self, client: httpx.AsyncClient, number: int) -> None:
        """Repeats one stream."""
        while True:
            body = _chat(number, TOKENS, stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if "error" in (event := json.loads(line.removeprefix("data: "))):
                        self.failed.append(str(event["error"]))
                    self.last[number] = time.monotonic()

    async def all_resumed(self, since: float) -> float:
        """Returns the seconds from `since` until each of them has received something after a stop of some."""
        waiting, gaps = set(range(STREAMS)), [0.0]
        await asyncio.sleep(1)  # what was on its way has arrived
        reference = dict(self.last)
        while waiting and time.monotonic() - since < GIVE_UP_S:
            await asyncio.sleep(POLL_S)
            for number in list(waiting):
                if self.last[number] > reference[number]:
                    waiting.discard(number)
                    gaps.append(self.last[number] - since)
        return GIVE_UP_S if waiting else max(gaps)


class Measurement:
    """A suite under load, and a table."""

    def __init__(self, suite: LooseSuite, rows: Rows) -> None:
        self.suite = suite
        self.rows = rows

    @asynccontextmanager
    async def load(self) -> AsyncIterator[tuple[httpx.AsyncClient, Streams]]:
        """Runs streams."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.suite.url, timeout=GIVE_UP_S, limits=limits) as client:
            streams = Streams()
            tasks = [asyncio.create_task(streams.run(client, number)) for number in range(STREAMS)]
            try:
                while len(streams.last) < STREAMS:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                await asyncio.sleep(RUNNING_S)
                yield client, streams
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.rows.failed += streams.failed

    async def slowest(self, client: httpx.AsyncClient, since: float, **fields: Any) -> float:
        """Sends new requests over two seconds; returns how long the slowest took."""

        async def one(number: int) -> float:
            await asyncio.sleep(2 * number / NEW)
            sent = time.monotonic()
            response = await client.post("/v1/chat/completions", json=_chat(100 + number, NEW_TOKENS, **fields))
            if response.status_code != 200:
                self.rows.failed.append(response.text)
            return time.monotonic() - sent

        return max(await asyncio.gather(*map(one, range(NEW))))

    async def stopped_service(
        self, name: str, shown: str, *others: tuple[str, str, Callable[[float], Awaitable[float]]]
    ) -> None:
        """Stops a service that the gateway calls; `others` wait for it, too: who, what happens, and its seconds."""
        async with self.load() as (client, streams):
            os.kill(self.suite.pid(name), signal.SIGSTOP)
            since = time.monotonic()
            try:
                resumed, slowest, *seconds = await asyncio.gather(
                    streams.all_resumed(since),
                    self.slowest(client, since),
                    *(measure(since) for _, _, measure in others),
                )
            finally:
                os.kill(self.suite.pid(name), signal.SIGCONT)
            self.rows.add(shown, "gateway, running streams", "all receive tokens again", resumed)
            self.rows.add(shown, "gateway, new requests", "the slowest is answered", slowest)
            for (who, happens, _), measured in zip(others, seconds, strict=True):
                self.rows.add(shown, who, happens, measured)
        await asyncio.to_thread(self.suite.wait_ready, len(self.suite.workers))

    async def until_listed(self, router: str, wanted: Callable[[set[str]], bool], since: float) -> float:
        """Returns the seconds until the workers that a router lists are as wanted."""
        async with open_channel(self.suite.address(router)) as channel:
            stub = router_pb2_grpc.RouterStub(channel)

            async def listed() -> bool:
                response = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5)
                return wanted({worker.worker_id for worker in response.workers})

            return await _until(listed, since)

    async def body_query(self, router: str) -> float:
        """Returns the seconds that a router takes for queries with bodies, which preprocess tokenizes."""
        async with open_channel(self.suite.address(router)) as channel:
            stub = router_pb2_grpc.RouterStub(channel)

            async def query(number: int) -> None:
                prompt = router_pb2.PromptRef(openai_body=json.dumps(_chat(number, 1)).encode())
                await stub.RouteQuery(router_pb2.RouteQueryRequest(model="tiny", prompt=prompt), timeout=GIVE_UP_S)

            sent = time.monotonic()
            await asyncio.gather(*map(query, range(8)))
            return time.monotonic() - sent

    async def stopped_gateway(self, postprocess_metrics: str) -> None:
        """Stops the gateway; the others release what it holds."""
        async with self.load():
            os.kill(self.suite.pid("gateway"), signal.SIGSTOP)
            since = time.monotonic()
            try:
                worker, postprocess, router = await asyncio.gather(
                    _until(self._workers_idle, since),
                    _until(lambda: _no_streams(postprocess_metrics), since),
                    _until(self._nothing_reserved, since),
                )
            finally:
                os.kill(self.suite.pid("gateway"), signal.SIGCONT)
        self.rows.add("gateway", "workers", "generations are cancelled", worker)
        self.rows.add("gateway", "postprocess", "streams are closed", postprocess)
        self.rows.add("gateway", "router", "reservations are released", router)
        self.rows.failed.clear()  # its own streams
        await asyncio.to_thread(self.suite.wait_ready, len(self.suite.workers))

    async def _workers_idle(self) -> bool:
        for name in self.suite.workers:
            async with open_channel(self.suite.address(name)) as channel:
                info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=5)
                if info.load.running_requests:
                    return False
        return True

    async def _nothing_reserved(self) -> bool:
        async with open_channel(self.suite.address("router")) as channel:
            loads = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest(), timeout=5)
            return not any(load.requests for load in loads.loads)

    async def stopped_templates(self, parent: bool) -> None:
        """Stops the process that runs templates of clients, or the one that it is forked from."""
        async with httpx.AsyncClient(base_url=self.suite.url, timeout=GIVE_UP_S) as client:
            await self.slowest(client, time.monotonic(), chat_template=TEMPLATE)
            stopped = []
            for name in ("preprocess", "preprocess-1"):
                servers = psutil.Process(self.suite.pid(name)).children()
                stopped += servers if parent else [fork for server in servers for fork in server.children()]
            for process in stopped:
                process.suspend()
            shown = "server of template processes" if parent else "template process"
            try:
                seconds = await self.slowest(client, time.monotonic(), chat_template=TEMPLATE)
            finally:
                for process in stopped:
                    if process.is_running():
                        process.resume()
            self.rows.add(shown, "preprocess", "the slowest request is answered", seconds)
            self.rows.failed = [failure for failure in self.rows.failed if "did not finish within" not in failure]

    async def stopped_idle(self) -> None:
        """Stops the ends of sessions that carry nothing."""
        server, client = await asyncio.gather(
            seconds_until_stopped_server_is_lost(), seconds_until_stopped_client_is_lost()
        )
        self.rows.add("any server, idle", "its callers", "sessions end", server)
        self.rows.add("any caller, idle", "its servers", "sessions end", client)


async def _no_streams(address: str) -> bool:
    async with httpx.AsyncClient() as client:
        lines = (await client.get(f"http://{address}/metrics")).text.splitlines()
    return all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines if line.startswith("sluice_postprocess_streams"))


async def _until(condition: Callable[[], Awaitable[bool]], since: float) -> float:
    while time.monotonic() - since < GIVE_UP_S:
        if await condition():
            return time.monotonic() - since
        await asyncio.sleep(POLL_S)
    return GIVE_UP_S


async def _measure(suite: LooseSuite, metrics: str, only: str, rows: Rows) -> None:
    measurement = Measurement(suite, rows)

    def lacks(name: str) -> Callable[[float], Awaitable[float]]:
        return lambda since: measurement.until_listed("router", lambda listed: name not in listed, since)

    def all_listed(since: float) -> Awaitable[float]:
        everyone = set(suite.workers)
        return measurement.until_listed("router-1", lambda listed: listed >= everyone, since)

    async def returned(since: float) -> float:
        await asyncio.sleep(8)  # longer than a lease: the workers of the stopped router have been removed
        return await all_listed(since)

    steps: dict[str, Callable[[], Awaitable[None]]] = {
        "idle": measurement.stopped_idle,
        "worker": lambda: measurement.stopped_service(
            "worker-0", "worker", ("router", "no longer lists it", lacks("worker-0"))
        ),
        "foreign": lambda: measurement.stopped_service("worker-1", "foreign worker (pinged every 310 s)"),
        "preprocess": lambda: measurement.stopped_service(
            "preprocess",
            "preprocess",
            ("router, bodies", "the slowest is tokenized", lambda _: measurement.body_query("router")),
        ),
        "postprocess": lambda: measurement.stopped_service("postprocess-0", "postprocess"),
        "router": lambda: measurement.stopped_service(
            "router", "router", ("workers", "attached to the other router", returned)
        ),
        "gateway": lambda: measurement.stopped_gateway(metrics),
        "template": lambda: measurement.stopped_templates(parent=False),
        "template-server": lambda: measurement.stopped_templates(parent=True),
    }
    for name, step in steps.items():
        if only in ("", name):
            await step()


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure one process")
    only = parser.parse_args().only
    rows = Rows()
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            model = build_tiny_model(Path(folder) / "tiny")
            metrics = f"127.0.0.1:{free_port()}"
            shared = ("--redis-url", redis.url)
            flags_of = {"router": shared, "router-1": shared, "postprocess-0": ("--metrics-listen", metrics)}
            flags = ("--engine-args", f"timing=fixed,fixed_step_ms={STEP_MS}", "--canary-s", "0")
            with LooseSuite(
                model, worker_flags=flags, flags_of=flags_of, code_of={"worker-1": FOREIGN}, preprocess=2, routers=2
            ) as suite:
                print("| stopped | who waits | until | seconds |\n| --- | --- | --- | --- |")
                asyncio.run(_measure(suite, metrics, only, rows))
        finally:
            redis.stop()
    for problem in (*rows.late, *rows.failed):
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if rows.late or rows.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
