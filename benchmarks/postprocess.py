"""What a token costs in postprocess: one real process, one session, many streams, CPU as the system counts it.

    python benchmarks/postprocess.py [--streams 256] [--steps 2000] [--stop TEXT ...]

Every message carries one token for every stream, as a worker's engine step does. `--in-flight` messages are under way
at a time. The client does not look at the text.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time

import grpc
import psutil
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from services.common.channels import open_channel
from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE, resolve
from services.common.packing import pack_u32
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc

TEXT = """The quick brown fox jumps over the lazy dog, while it rains — softly — in München. def main(): return 42
"""


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000, help="tokens of each stream")
    parser.add_argument("--in-flight", type=int, default=4, help="messages sent ahead of their answers")
    parser.add_argument("--stop", action="append", default=[], help="stop string of every stream, repeatable")
    return parser.parse_args()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until_serving(channel: grpc.aio.Channel) -> None:
    """Waits for the service, a minute at most."""
    health = health_pb2_grpc.HealthStub(channel)
    for _ in range(600):
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest())
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
        except grpc.aio.AioRpcError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the service did not become healthy")


async def carry(channel: grpc.aio.Channel, streams: int, steps: int, in_flight: int, stop: list[str]) -> int:
    """Sends `steps` messages with a token for each stream; returns the code points that came back."""
    tokenizer = Tekkenizer.from_file(resolve(DEFAULT_SOURCE))
    ids = tokenizer.encode(TEXT * (steps * 2 // 20 + streams), bos=False, eos=False)
    slots, counts = pack_u32(range(streams)), pack_u32([1] * streams)
    call = postprocess_pb2_grpc.PostprocessStub(channel).Session()
    options = postprocess_pb2.StreamOptions(model=DEFAULT_NAME, stop=stop)
    opens = [postprocess_pb2.OpenStream(slot=slot, options=options) for slot in range(streams)]
    await call.write(postprocess_pb2.PostSessionRequest(opens=opens))
    credits = asyncio.Semaphore(in_flight)
    received = 0

    async def read() -> None:
        nonlocal received
        while (batch := await call.read()) is not grpc.aio.EOF:
            received += len(batch.text)
            credits.release()

    reading = asyncio.create_task(read())
    for step in range(steps):
        await credits.acquire()
        columns = postprocess_pb2.TokenColumns(
            slots=slots, counts=counts, token_ids=pack_u32(ids[step : step + streams])
        )
        await call.write(postprocess_pb2.PostSessionRequest(tokens=columns))
    await call.done_writing()
    await reading
    return received


async def measure(options: argparse.Namespace, port: int, process: psutil.Process) -> str:
    """Runs a warm-up and the measured round against a service; the figures in one line."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await until_serving(channel)
        await carry(channel, options.streams, 100, options.in_flight, options.stop)
        before, started = process.cpu_times(), time.perf_counter()
        received = await carry(channel, options.streams, options.steps, options.in_flight, options.stop)
        wall, after = time.perf_counter() - started, process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    tokens = options.streams * options.steps
    return (
        f"{tokens} tokens, {received} code points: {tokens / wall:,.0f} tokens/s, "
        f"{cpu / tokens * 1e6:.2f} µs CPU a token, {cpu / options.steps * 1e6:.0f} µs a message, "
        f"{process.memory_info().rss >> 20} MiB resident"
    )


def main() -> None:
    """Starts the service, measures it and stops it."""
    options, port = arguments(), free_port()
    command = [sys.executable, "-m", "services.postprocess", "--listen", f"127.0.0.1:{port}", "--log-level", "warning"]
    with subprocess.Popen(command) as service:
        try:
            print(uvloop.run(measure(options, port, psutil.Process(service.pid))))
        finally:
            service.terminate()


if __name__ == "__main__":
    main()
