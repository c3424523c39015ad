"""Many workers that attach to routers and hold blocks; a process of its own, told on stdin what their caches change.

A line `WORKER SEED` makes a worker store the new blocks of the request with this seed, and remove as many old ones.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Annotated, Any

import grpc
import typer
import uvloop

from services.common.rpc.channels import open_channel
from services.common.types.hashing import HASH_SCHEME
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc

BLOCK_SIZE = 16
DOCUMENT_BLOCKS, NEW_BLOCKS = 100, 20
TOTAL_BLOCKS = 1 << 20
EVENTS_S = 0.02
"""Pause between the messages of a worker, as a real one keeps it."""
HASHES_AT_ONCE = 2_000
AT_ONCE = 4
WITHIN_S = 300.0
HASH_BYTES = 8

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def worker_name(number: int) -> str:
    """Returns the id of a worker."""
    return f"worker-{number:04}"


def address_of(number: int, port: int) -> str:
    """Returns host:port of a worker that gateways can reach: each has a loopback address of its own."""
    return f"127.1.{number // 250}.{number % 250 + 1}:{port}"


def document(number: int) -> bytes:
    """Returns the packed hashes of a prompt's beginning; the worker of this number, modulo all workers, holds them."""
    return Random(number).randbytes(DOCUMENT_BLOCKS * HASH_BYTES)


def new_blocks(seed: str) -> bytes:
    """Returns the packed hashes of the rest of a prompt, which no worker holds."""
    return Random(seed).randbytes(NEW_BLOCKS * HASH_BYTES)


class FleetWorker:
    """A worker that renews its lease and sends its events."""

    def __init__(self, number: int, model: str, router: str, port: int) -> None:
        self._name = worker_name(number)
        self._address = address_of(number, port) if port else f"{self._name}:50051"
        self._model = model
        self._channel = open_channel(router)
        self._call: Any = None
        self._sequence = 0
        self._acked = 0
        self._heartbeat_s = 1.0
        self._pending: list[router_pb2.KvEvent] = []
        self._new: deque[bytes] = deque()
        self._writing = asyncio.Lock()  # a call takes one message at a time

    async def register(self) -> None:
        """Attaches the worker; waits for a router that is starting."""
        deadline = asyncio.get_running_loop().time() + WITHIN_S
        while True:
            try:
                return await self._register()
            except grpc.aio.AioRpcError as error:
                starting = error.code() is grpc.StatusCode.UNAVAILABLE
                if not starting or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def _register(self) -> None:
        card = common_pb2.ModelCard(
            model=self._model,
            block_size=BLOCK_SIZE,
            hash_scheme=HASH_SCHEME,
            total_blocks=TOTAL_BLOCKS,
            capabilities=["kv_events"],
        )
        registration = router_pb2.Registration(
            worker_id=self._name, address=self._address, epoch=1, card=card, lease_key=bytes(16)
        )
        self._call = router_pb2_grpc.RouterStub(self._channel).Attach(wait_for_ready=True)
        await self._call.write(router_pb2.AttachRequest(registration=registration))
        answer = await asyncio.wait_for(self._call.read(), WITHIN_S)
        self._heartbeat_s = answer.attached.heartbeat_interval_ms / 1000

    async def hold(self, documents: Iterable[int]) -> None:
        """Stores documents, and waits until they are durable."""
        hashes = bytearray()
        for number in documents:
            hashes += document(number)
            if len(hashes) >= HASHES_AT_ONCE * HASH_BYTES:
                await self._store(bytes(hashes))
                hashes.clear()
        if hashes:
            await self._store(bytes(hashes))
        while self._acked < self._sequence:
            self._acked = (await asyncio.wait_for(self._call.read(), WITHIN_S)).ack.sequence

    async def _store(self, hashes: bytes) -> None:
        await self._write([router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=hashes))])

    async def _write(self, events: list[router_pb2.KvEvent]) -> None:
        async with self._writing:
            self._sequence += 1
            batch = router_pb2.KvEventBatch(sequence=self._sequence, events=events)
            await self._call.write(router_pb2.AttachRequest(events=batch))

    def computed(self, seed: str) -> None:
        """Stores the new blocks of a request, and removes those of the oldest one."""
        hashes = new_blocks(seed)
        self._new.append(hashes)
        self._pending.append(router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=hashes)))
        if len(self._new) > 10:
            removed = router_pb2.BlocksRemoved(block_hashes=self._new.popleft())
            self._pending.append(router_pb2.KvEvent(removed=removed))

    async def flush(self) -> None:
        """Sends what has changed."""
        if events := self._pending:
            self._pending = []
            await self._write(events)

    async def serve(self) -> None:
        """Sends heartbeats and reads acknowledgements until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._renew())

    async def _read(self) -> None:
        while await self._call.read():
            pass

    async def _renew(self) -> None:
        load = common_pb2.WorkerLoad(used_blocks=1000, cached_blocks=5000, step_ms=20)
        await asyncio.sleep(Random(self._name).uniform(0, self._heartbeat_s))
        while True:
            async with self._writing:
                await self._call.write(router_pb2.AttachRequest(heartbeat=router_pb2.Heartbeat(loads=[load])))
            await asyncio.sleep(self._heartbeat_s)


class Fleet:
    """All workers."""

    def __init__(self, routers: Sequence[str], models: Sequence[str], workers: int, port: int) -> None:
        self._workers = [
            FleetWorker(at, models[at % len(models)], routers[at % len(routers)], port) for at in range(workers)
        ]
        self._changed: set[FleetWorker] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self, documents: int) -> None:
        """Attaches all of them, which then hold so many documents together."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def attached(number: int, worker: FleetWorker) -> None:
            async with gate:
                await worker.register()
                await worker.hold(range(number, documents, len(self._workers)))
            self._spawn(worker.serve())

        await asyncio.gather(*(attached(number, worker) for number, worker in enumerate(self._workers)))
        self._spawn(self._flush())

    def _spawn(self, running: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(running)
        task.add_done_callback(_print_failure)
        self._tasks.append(task)

    def computed(self, worker: int, seed: str) -> None:
        """Lets a worker compute a request."""
        self._workers[worker].computed(seed)
        self._changed.add(self._workers[worker])

    async def _flush(self) -> None:
        while True:
            changed, self._changed = self._changed, set()
            for worker in changed:
                await worker.flush()
            await asyncio.sleep(EVENTS_S)

    async def close(self) -> None:
        """Ends their streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _idle(messages: Any, context: Any) -> Any:
    """Serves the session of a gateway that sends no requests."""
    await context.send_initial_metadata(())
    async for _ in messages:
        yield b""


@asynccontextmanager
async def serving(workers: int, port: int) -> AsyncIterator[None]:
    """Serves sessions at the addresses of all workers; nothing with port 0."""
    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(_idle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sluice.v1.Worker", {"Session": handler}),))
    for number in range(workers if port else 0):
        server.add_insecure_port(address_of(number, port))
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


def _print_failure(task: asyncio.Task[None]) -> None:
    """Prints why a worker has ended, which nothing else would."""
    if not task.cancelled() and (error := task.exception()) is not None:
        print(f"growth_fleet.py: {error!r}", file=sys.stderr, flush=True)


async def _run(fleet: Fleet, blocks: int) -> None:
    await fleet.attach(blocks // DOCUMENT_BLOCKS)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    async for line in lines:
        worker, seed = line.decode().split()
        fleet.computed(int(worker), seed)
    await fleet.close()


@app.command()
def main(
    router: Annotated[list[str], typer.Option(help="host:port, repeated; workers are spread over them")],
    model: Annotated[list[str], typer.Option(help="repeated; workers are spread over them")],
    workers: Annotated[int, typer.Option(min=1)] = 100,
    blocks: Annotated[int, typer.Option(min=DOCUMENT_BLOCKS, help="that all of them hold")] = 10_000,
    port: Annotated[int, typer.Option(help="at which gateways reach them, on loopback; 0: nowhere")] = 0,
) -> None:
    """Attach workers until stdin ends."""

    async def run() -> None:
        async with serving(workers, port):
            await _run(Fleet(router, model, workers, port), blocks)

    uvloop.run(run())


if __name__ == "__main__":
    app()
