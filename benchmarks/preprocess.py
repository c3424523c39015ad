"""What preprocess costs: requests a second, latency alone, and CPU of the service process per request.

Starts the service itself, on loopback:  python -m benchmarks.preprocess [--requests N] [flags of the service …]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import psutil

from services.common.channels import open_channel
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc
from tests.support.tiny_models import build_tiny_model

TEXT = "the quick brown fox jumps over a lazy dog while rain falls softly on old roofs "
BLOCK_SIZE = 16


def chat_of(model: str, words: int) -> preprocess_pb2.TokenizeRequest:
    """A chat of one user message with that many words."""
    text = " ".join((TEXT * words).split()[:words])
    messages = json.dumps([{"role": "user", "content": text}]).encode()
    return preprocess_pb2.TokenizeRequest(
        model=model, chat=preprocess_pb2.ChatInput(messages_json=messages), block_size=BLOCK_SIZE
    )


async def measure(
    stub: preprocess_pb2_grpc.PreprocessStub,
    process: psutil.Process,
    model: str,
    words: int,
    requests: int,
    concurrency: int,
) -> None:
    """Prints one line."""
    request = chat_of(model, words)
    tokens = len((await stub.Tokenize(request)).token_ids) // 4
    todo = iter(range(requests))

    async def client() -> None:
        for _ in todo:
            await stub.Tokenize(request)

    cpu, started = sum(process.cpu_times()[:2]), perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds, cpu = perf_counter() - started, sum(process.cpu_times()[:2]) - cpu
    started = perf_counter()
    for _ in range(100):
        await stub.Tokenize(request)
    alone_ms = (perf_counter() - started) * 10
    print(
        f"{model:8} {words:6} words {tokens:6} tokens  {requests / seconds:7.0f} requests/s  "
        f"{cpu / requests * 1e6:6.0f} us CPU a request  {alone_ms:6.2f} ms alone  "
        f"{process.memory_info().rss >> 20} MiB",
        flush=True,
    )


async def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=32)
    own, service_flags = parser.parse_known_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    tiny = build_tiny_model(Path(tempfile.mkdtemp()))
    models = f"tekken=mistral-common:tekken_240911,tiny={tiny}"
    command = [sys.executable, "-m", "services.preprocess", "--listen", address, "--models", models, *service_flags]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - nothing else runs yet
    try:
        channel = open_channel(address)
        await asyncio.wait_for(channel.channel_ready(), 30)
        stub = preprocess_pb2_grpc.PreprocessStub(channel)
        process = psutil.Process(child.pid)
        for model in ("tekken", "tiny"):
            for words, share in ((150, 1), (3000, 10)):
                await measure(stub, process, model, words, own.requests // share, own.concurrency)
        await channel.close()
    finally:
        child.terminate()
        child.wait(30)


if __name__ == "__main__":
    asyncio.run(main())
