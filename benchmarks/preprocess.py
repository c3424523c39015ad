"""What preprocess does a second, how long a prompt takes, and what it costs the service's processes in CPU.

Starts the service itself, on loopback:

    python benchmarks/preprocess.py                          # cold prompts, growing chats, short beside huge ones
    python benchmarks/preprocess.py --processes 2 --only cold --cache-mb 0

Flags it does not know are the service's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import perf_counter

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from processes import cpu_seconds
from prompt_text import Text, chat, growing_chat, user

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from sluice.v1 import preprocess_pb2 as pb
from sluice.v1 import preprocess_pb2_grpc
from tests.support.data.big_vocabulary import build_big_model

COLD = {100: 6000, 3000: 3000, 8000: 1200, 32_000: 320, 49_000: 200, 100_000: 100}
CHATS, TURNS, CHAT_TOKENS = 8, 20, 32_000
HUGE_TOKENS, SHORT_EVERY_S, SHORT_COUNT = 100_000, 0.01, 1500


class Service:
    """Replicas of the service, used in turn."""

    def __init__(
        self, stubs: Sequence[preprocess_pb2_grpc.PreprocessAsyncStub], processes: Sequence[psutil.Process]
    ) -> None:
        self._stubs = stubs
        self._processes = {str(process.pid): process for process in processes}
        self._next = 0

    def stub(self) -> preprocess_pb2_grpc.PreprocessAsyncStub:
        """The next replica."""
        self._next += 1
        return self._stubs[self._next % len(self._stubs)]

    def cpu(self) -> float:
        """CPU seconds of all replicas so far."""
        return sum(cpu_seconds(self._processes).values())

    def resident_mib(self) -> int:
        """Memory of all replicas."""
        return sum(process.memory_info().rss for process in self._processes.values()) >> 20


@contextlib.asynccontextmanager
async def running(processes: int, models: str, flags: Sequence[str]) -> AsyncIterator[Service]:
    """That many replicas on free ports."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(processes)]
    command = [sys.executable, "-m", "services.preprocess", "--models", models, "--log-level", "warning"]
    children = [
        subprocess.Popen([*command, "--listen", address, *flags])  # noqa: ASYNC220 - nothing else runs yet
        for address in addresses
    ]
    channels = [open_channel(address) for address in addresses]
    stubs: list[preprocess_pb2_grpc.PreprocessAsyncStub] = [
        preprocess_pb2_grpc.PreprocessStub(channel) for channel in channels
    ]
    try:
        for channel, stub in zip(channels, stubs, strict=True):
            await asyncio.wait_for(channel.channel_ready(), 60)
            for name in models.split(","):
                await stub.GetFingerprint(pb.GetFingerprintRequest(model=name.partition("=")[0]), timeout=60)
        yield Service(stubs, [psutil.Process(child.pid) for child in children])
    finally:
        for channel in channels:
            await channel.close()
        for child in children:
            child.terminate()
        for child in children:
            child.wait(30)


def percentile(values: Sequence[float], share: float) -> float:
    """Of milliseconds; 0 of nothing."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


async def timed(service: Service, request: pb.TokenizeRequest) -> tuple[float, int]:
    """Milliseconds and tokens."""
    started = perf_counter()
    answer = await service.stub().Tokenize(request)
    return (perf_counter() - started) * 1000, len(answer.token_ids) // 4


async def cold(service: Service, model: str, text: Text, tokens: int, count: int, concurrency: int) -> None:
    """Prompts that were never seen, as fast as they go."""
    requests = iter([chat(model, [user(text.of_tokens(tokens))]) for _ in range(count)])
    found: list[tuple[float, int]] = []

    async def client() -> None:
        for request in requests:
            found.append(await timed(service, request))  # noqa: PERF401 - several clients fill one list

    cpu, started = service.cpu(), perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds, cpu = perf_counter() - started, service.cpu() - cpu
    took = [milliseconds for milliseconds, _ in found]
    print(
        f"{model:7} cold  {sum(size for _, size in found) // count:7} tokens {count / seconds:8.1f} requests/s "
        f"{count / cpu:8.1f} requests/s/core   p50 {percentile(took, 0.5):7.2f} ms  "
        f"p99 {percentile(took, 0.99):7.2f} ms  {service.resident_mib():5} MiB",
        flush=True,
    )


async def turns(service: Service, model: str, text: Text) -> None:
    """Chats that grow, one after the other."""
    took: list[float] = []
    last: list[float] = []
    tokens = 0
    cpu = service.cpu()
    for _ in range(CHATS):
        for messages in growing_chat(text, TURNS, CHAT_TOKENS):
            milliseconds, tokens = await timed(service, chat(model, messages))
            took.append(milliseconds)
        last.append(milliseconds)
    cpu = service.cpu() - cpu
    print(
        f"{model:7} turns {tokens:7} tokens at last, {TURNS} turns   a turn's p50 {percentile(took, 0.5):6.2f} ms  "
        f"p99 {percentile(took, 0.99):6.2f} ms  the last one's p50 {percentile(last, 0.5):6.2f} ms  "
        f"{cpu / len(took) * 1000:6.2f} ms CPU",
        flush=True,
    )


async def mixed(service: Service, model: str, text: Text, huge_per_s: float) -> None:
    """Short prompts while huge ones are tokenized, both at a steady pace."""
    huge = [chat(model, [user(text.of_tokens(HUGE_TOKENS))]) for _ in range(64)]
    short = [chat(model, [user(text.of_tokens(100))]) for _ in range(SHORT_COUNT)]
    flood: list[asyncio.Task[tuple[float, int]]] = []

    async def keep_busy() -> None:
        while True:
            flood.append(asyncio.create_task(timed(service, huge[len(flood) % len(huge)])))
            await asyncio.sleep(1 / huge_per_s)

    busy = asyncio.create_task(keep_busy())
    asked: list[asyncio.Task[tuple[float, int]]] = []
    for request in short:
        asked.append(asyncio.create_task(timed(service, request)))
        await asyncio.sleep(SHORT_EVERY_S)
    took = [milliseconds for milliseconds, _ in await asyncio.gather(*asked)]
    busy.cancel()
    slow = [milliseconds for milliseconds, _ in await asyncio.gather(*flood)]
    print(
        f"{model:7} mixed short prompts beside {huge_per_s:g} of {HUGE_TOKENS} tokens a second: "
        f"p50 {percentile(took, 0.5):6.2f} ms  p99 {percentile(took, 0.99):6.2f} ms  max {max(took):6.2f} ms  "
        f"huge ones' p50 {percentile(slow, 0.5):6.2f} ms",
        flush=True,
    )


async def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="replicas of the service")
    parser.add_argument("--concurrency", type=int, default=16, help="cold prompts under way at once")
    parser.add_argument("--only", choices=("cold", "turns", "mixed"))
    parser.add_argument("--model", choices=("tekken", "hf"))
    parser.add_argument("--tokens", type=int, choices=sorted(COLD), help="cold prompts of this size only")
    parser.add_argument("--huge-per-s", type=float, default=20.0, help="huge prompts beside the short ones")
    own, flags = parser.parse_known_args()
    folder = build_big_model(Path(tempfile.mkdtemp()))
    known = {"tekken": "tekken=mistral-common:tekken_240911", "hf": f"hf={folder}"}
    chosen = {name: known[name] for name in known if own.model in (None, name)}
    async with running(own.processes, ",".join(chosen.values()), flags) as service:
        text = Text(seed=1)
        for model in chosen:
            listed = await service.stub().ListModels(pb.ListTokenizersRequest())
            print({info.model: info.backend for info in listed.models}[model], f"x {own.processes}", flush=True)
            sample = text.of_tokens(10_000)
            _, tokens = await timed(service, chat(model, [user(sample)]))
            text.chars_a_token = len(sample) / tokens
            if own.only in (None, "cold"):
                for tokens, count in COLD.items():
                    if own.tokens in (None, tokens):
                        await cold(service, model, text, tokens, count, own.concurrency)
            if own.only in (None, "turns"):
                await turns(service, model, text)
            if own.only in (None, "mixed"):
                await mixed(service, model, text, own.huge_per_s)


if __name__ == "__main__":
    uvloop.run(main())
