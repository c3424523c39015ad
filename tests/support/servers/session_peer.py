"""One end of a session in a process of its own, which tests stop or keep busy.

`python -m tests.support.servers.session_peer serve` prints its port; with `SECONDS` after it, every session keeps the
process's event loop and interpreter busy for that long before its first message. `… connect PORT` opens a session,
`… own ADDRESS OWNER` the stream of an owner of reservations, and prints a line.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.common.base.errors import ErrorKind
from services.common.rpc.channels import open_channel
from services.common.rpc.server import GrpcServer
from services.common.rpc.session import ClientSession
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc


class _Silent(worker_pb2_grpc.WorkerServicer):
    def __init__(self, busy_s: float) -> None:
        self._busy_s = busy_s

    async def Session(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        if self._busy_s:
            end = time.monotonic() + self._busy_s
            while time.monotonic() < end:
                sum(range(1_000))
            await context.write(worker_pb2.TokenBatch())
        await asyncio.Event().wait()


async def _serve(busy_s: float) -> None:
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(_Silent(busy_s), server.server)  # type: ignore[abstract]
    await server.start()
    await server.set_serving(True)
    print(server.port, flush=True)
    await asyncio.Event().wait()


async def _connect(port: str) -> None:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(worker_pb2.WorkerSessionRequest())
        await call.read()


async def _own(address: str, owner: str) -> None:
    async with open_channel(address) as channel:
        call = router_pb2_grpc.RouterStub(channel).WatchWorkers(router_pb2.WatchWorkersRequest(owner=owner))
        async for _ in call:
            print("open", flush=True)


@contextmanager
def session_peer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs this module; kills it at the end, stopped or not."""
    command = [sys.executable, "-m", __name__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def seconds_until_stopped_server_is_lost() -> float:
    """Stops the server of an idle session; returns how long its caller takes to notice."""
    with session_peer("serve") as process:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            session = ClientSession(
                "worker w", worker_pb2_grpc.WorkerStub(channel).Session, lambda: None, lambda message: None
            )
            running = asyncio.create_task(session.run())
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            assert (await running).kind is ErrorKind.DISCONNECTED
            return time.monotonic() - stopped_at


async def seconds_until_stopped_client_is_lost() -> float:
    """Stops the caller of an idle session; returns how long the server takes to notice."""
    opened, ended = asyncio.Event(), asyncio.Event()

    class Waiting(worker_pb2_grpc.WorkerServicer):
        async def Session(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            await context.read()
            opened.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(Waiting(), server.server)  # type: ignore[abstract]
    await server.start()
    try:
        with session_peer("connect", str(server.port)) as process:
            await asyncio.wait_for(opened.wait(), 20)
            process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            await ended.wait()
            return time.monotonic() - stopped_at
    finally:
        await server.stop(0)


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    run = {"serve": lambda: _serve(float(rest[0]) if rest else 0.0), "connect": lambda: _connect(*rest)}
    asyncio.run(run.get(verb, lambda: _own(*rest))())
