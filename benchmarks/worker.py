"""What the worker layer costs: the mock engine with no time model, bare and behind a session of a real worker process.

    python benchmarks/worker.py [--streams 1 32 256] [--tokens 500000] [--memory 100000]

The bare engine gives its tokens to a sink that drops them. Behind the worker the same tokens go through the checks, the
session and gRPC; the client does not look at them. CPU is the process's own, as the system counts it; the difference of
the two is the worker layer. `--memory` then runs so many short requests and compares resident memory at a tenth of
them and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

import grpc
import psutil
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.packing import pack_u32
from services.common.net.ports import free_port
from services.common.packages.model_files import DEFAULT_NAME
from services.common.rpc.channels import open_channel
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs, StopParams, Usage
from services.worker.engines.mock import MockEngine
from services.worker.settings import WorkerSettings
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

FLAGS: dict[str, Any] = {
    "engine_args": "timing=fixed,fixed_step_ms=0,fixed_prefill_us=0",
    "total_blocks": 65_536,
    "canary_s": 0.0,
}
PROMPT = array("I", range(20, 84))


class Dropped(Sink):
    """Forgets its tokens and says when it is over."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        pass

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        pass

    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: Exception | None = None,
        handoff: bytes = b"",
    ) -> None:
        self.done.set()


async def bare(streams: int, tokens: int) -> dict[str, float]:
    """The engine alone, in this process."""
    engine = MockEngine.from_args(WorkerSettings(**FLAGS))
    await engine.start("bench")
    each = tokens // streams

    async def round_of(length: int) -> None:
        sinks = [Dropped() for _ in range(streams)]
        for index, sink in enumerate(sinks):
            stop = StopParams(max_tokens=length, ignore_eos=True)
            engine.submit(
                GenerateRequest(f"r{index}", DEFAULT_NAME, PROMPT, stop=stop), GenerateContext(f"r{index}"), sink
            )
        for sink in sinks:
            await sink.done.wait()

    await round_of(20)
    cpu, wall = time.process_time(), time.perf_counter()
    await round_of(each)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await engine.cleanup()
    return {"us_per_token": cpu / (each * streams) * 1e6, "tokens_per_s": each * streams / wall}


class Client:
    """One session to the worker that counts tokens by their bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = worker_pb2_grpc.WorkerStub(channel).Session()
        self._ended = 0
        self._wanted = 0
        self._enough = asyncio.Event()
        self._numbers = itertools.count()
        self.tokens = 0
        self.messages = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while isinstance(batch := await self._call.read(), worker_pb2.TokenBatch):
            self.messages += 1
            self.tokens += len(batch.token_ids) // 4
            for extra in batch.extras:
                if extra.finish_reason:
                    assert not extra.HasField("error"), extra.error
                    self._ended += 1
            if self._ended >= self._wanted:
                self._enough.set()

    async def run(self, requests: int, tokens: int, prompt: Sequence[int] = PROMPT) -> None:
        """So many requests at once; returns when all have ended."""
        self._enough.clear()
        self._wanted += requests
        starts = []
        for number in itertools.islice(self._numbers, requests):
            asked = worker_pb2.GenerateRequest(
                request_id=f"r{number}",
                model=DEFAULT_NAME,
                tokens=worker_pb2.TokenPrompt(token_ids=pack_u32(prompt)),
                stop=common_pb2.StopOptions(max_tokens=tokens, ignore_eos=True),
            )
            starts.append(worker_pb2.SessionStart(slot=number, request=asked))
        await self._call.write(worker_pb2.WorkerSessionRequest(starts=starts))
        await self._enough.wait()

    async def close(self) -> None:
        """Ends the session."""
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def behind_worker(port: int, process: psutil.Process, streams: int, tokens: int) -> dict[str, float]:
    """The same tokens through a session."""
    each = tokens // streams
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await until_serving(channel)
        client = Client(channel)
        await client.run(streams, 20)
        client.tokens = client.messages = 0
        before, wall = process.cpu_times(), time.perf_counter()
        await client.run(streams, each)
        wall, after = time.perf_counter() - wall, process.cpu_times()
        await client.close()
    assert client.tokens == each * streams
    cpu = after.user + after.system - before.user - before.system
    return {
        "us_per_token": cpu / client.tokens * 1e6,
        "tokens_per_s": client.tokens / wall,
        "tokens_per_message": client.tokens / client.messages,
    }


async def memory(port: int, process: psutil.Process, requests: int) -> dict[str, float]:
    """Resident bytes after a tenth of the requests, and after all."""
    chance = random.Random(1)
    looks = []
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await until_serving(channel)
        client = Client(channel)
        for count in (requests // 10, requests - requests // 10):
            for _ in range(count // 100):
                await client.run(100, 4, [chance.randrange(20, 50_000) for _ in range(40)])
            looks.append(process.memory_info().rss)
        await client.close()
    return {"first": looks[0], "last": looks[1], "ratio": looks[1] / looks[0]}


async def measure(
    port: int, process: psutil.Process, rows: dict[int, dict[str, dict[str, float]]], options: argparse.Namespace
) -> dict[str, float]:
    """Adds to each row what a worker process makes of it; the memory, if that is asked for."""
    for streams, row in rows.items():
        tokens = options.tokens // (20 if streams == 1 else 1)
        row["worker"] = await behind_worker(port, process, streams, tokens)
    return await memory(port, process, options.memory) if options.memory else {}


async def until_serving(channel: grpc.aio.Channel) -> None:
    """Waits for the worker, a minute at most."""
    health = health_pb2_grpc.HealthStub(channel)
    for _ in range(600):
        try:
            if (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING:
                return
        except grpc.aio.AioRpcError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the worker did not become healthy")


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=500_000, help="of all streams together")
    parser.add_argument("--memory", type=int, default=0, help="requests to watch the memory over; 0: none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> None:
    """Measures the bare engine, then a worker process, for each number of streams."""
    options, port = arguments(), free_port()
    rows = {}
    for streams in options.streams:
        # One stream is slow behind a worker: a message a token. Fewer tokens tell as much.
        tokens = options.tokens // (20 if streams == 1 else 1)
        rows[streams] = {"bare": uvloop.run(bare(streams, tokens))}
    flags = [text for name, value in FLAGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        sys.executable,
        "-m",
        "services.worker",
        "--listen",
        f"127.0.0.1:{port}",
        "--log-level",
        "warning",
        *flags,
    ]
    with subprocess.Popen(command) as service:
        try:
            process = psutil.Process(service.pid)
            watched = uvloop.run(measure(port, process, rows, options))
        finally:
            service.terminate()
    if options.json:
        print(json.dumps({"load": os.getloadavg()[0], "streams": rows, "memory": watched}, indent=2))
        return
    for streams, row in rows.items():
        alone, behind = row["bare"], row["worker"]
        print(
            f"{streams:4} streams: bare {alone['us_per_token']:.2f} µs a token ({alone['tokens_per_s']:,.0f}/s), "
            f"behind the worker {behind['us_per_token']:.2f} µs ({behind['tokens_per_s']:,.0f}/s, "
            f"{behind['tokens_per_message']:.0f} tokens a message): "
            f"the layer costs {behind['us_per_token'] - alone['us_per_token']:.2f} µs"
        )
    if watched:
        print(
            f"memory over {options.memory:,} requests: {watched['first'] / 2**20:.1f} MiB, then "
            f"{watched['last'] / 2**20:.1f} MiB, ratio {watched['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
