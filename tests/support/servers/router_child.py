"""A router as a process of its own, to be killed, frozen and timed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.repository import ROOT
from tests.support.waiting import until


class RouterChild:
    """One replica.

    Args:
        folder: for its log.
        flags: of its command line.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self._log = folder / f"router-{self.port}.log"
        listen = f"127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "services.router", "--listen", listen, "--metrics-listen", "", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> float:
        """Starts; returns the seconds until it was serving."""
        started = time.monotonic()
        self._process = self._spawn()
        self.channel = open_channel(f"127.0.0.1:{self.port}")
        self.stub = router_pb2_grpc.RouterStub(self.channel)
        await until(self._serving, timeout_s=120)
        return time.monotonic() - started

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, cwd=ROOT)

    async def kill(self) -> None:
        """Ends it without a word."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Ends it in order, also when it is frozen."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            await self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """It keeps its connections and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undoes `freeze`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has been started and not been ended."""
        return self._process is not None

    @property
    def cpu_s(self) -> float:
        """Processor seconds it has used: what its start would take on a machine with nothing else to do."""
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def log(self) -> str:
        """All it said."""
        return self._log.read_text()

    async def dump(self) -> list[tuple[Any, ...]]:
        """Its index."""
        stream = self.stub.DumpIndex(router_pb2.DumpIndexRequest())
        return [
            (each.worker_id, each.data_parallel_rank, each.tier, each.epoch, each.sequence, each.block_hashes)
            async for each in stream
        ]

    async def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        await self.channel.close()
        self._process.send_signal(how)
        await asyncio.to_thread(self._process.wait, 30)
        self._process = None

    async def _serving(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            answer = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def router_children(count: int, folder: Path, *flags: str) -> AsyncIterator[list[RouterChild]]:
    """Replicas, stopped at the end."""
    children = [RouterChild(folder, *flags) for _ in range(count)]
    try:
        await asyncio.gather(*(child.start() for child in children))
        yield children
    finally:
        await asyncio.gather(*(child.stop() for child in children))
