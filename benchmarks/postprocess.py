"""What a token costs in postprocess: one real process, one session, many streams, CPU as the system counts it.

    python benchmarks/postprocess.py [--streams 256] [--steps 2000] [--stop TEXT ...] [--parser NAME]

Every message carries one token for every stream, as a worker's engine step does. `--in-flight` messages are under way
at a time. The client does not look at the text. With --parser the streams say tool calls of that format, one after the
other, and what a stream costs in memory is told as well.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
import tracemalloc

import grpc
import psutil
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from services.common.channels import open_channel
from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec, resolve
from services.common.packing import pack_u32
from services.postprocess.library import load
from services.postprocess.opening import Opener
from services.postprocess.stream import Limits, StreamOptions
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc

TEXT = """The quick brown fox jumps over the lazy dog, while it rains — softly — in München. def main(): return 42
"""

ARGUMENTS = '{"city": "München", "text": "The quick brown fox jumps over the lazy dog, while it rains", "days": [1, 2]}'
CALLS = {
    "": TEXT,
    "hermes": f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n',
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; ',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "pythonic": '[get_weather(city="München", text="The quick brown fox jumps over the lazy dog", days=[1, 2])], ',
    "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|><|start|>assistant",
}
TOOLS = b'[{"type": "function", "function": {"name": "get_weather"}}]'


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000, help="tokens of each stream")
    parser.add_argument("--in-flight", type=int, default=4, help="messages sent ahead of their answers")
    parser.add_argument("--stop", action="append", default=[], help="stop string of every stream, repeatable")
    parser.add_argument("--parser", choices=sorted(CALLS), default="", help="tool parser of every stream")
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


async def carry(channel: grpc.aio.Channel, options: argparse.Namespace, steps: int) -> int:
    """Sends `steps` messages with a token for each stream; returns the code points that came back."""
    streams = options.streams + bool(options.parser)
    ids = tokens_of(options.parser, steps + streams)
    slots, counts = pack_u32(range(streams)), pack_u32([1] * streams)
    call = postprocess_pb2_grpc.PostprocessStub(channel).Session()
    plain = postprocess_pb2.StreamOptions(model=DEFAULT_NAME, stop=options.stop)
    wanted = postprocess_pb2.StreamOptions(tool_parser=options.parser, tools_json=TOOLS if options.parser else b"")
    wanted.MergeFrom(plain)
    opens = [postprocess_pb2.OpenStream(slot=slot, options=wanted) for slot in range(options.streams)]
    if options.parser:  # one that has an answer to every message, whatever the parsers hold back
        opens.append(postprocess_pb2.OpenStream(slot=options.streams, options=plain))
    await call.write(postprocess_pb2.PostSessionRequest(opens=opens))
    credits = asyncio.Semaphore(options.in_flight)
    received = 0

    async def read() -> None:
        nonlocal received
        while isinstance(batch := await call.read(), postprocess_pb2.TextBatch):
            received += len(batch.text)
            for event in batch.events:
                received += len(event.text) + sum(len(call.arguments) for call in event.tool_calls)
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


def tokens_of(parser: str, number: int) -> list[int]:
    """So many tokens of plain text, or of tool calls in a parser's format."""
    tokenizer = Tekkenizer.from_file(resolve(DEFAULT_SOURCE))
    once = tokenizer.encode(CALLS[parser], bos=False, eos=False)
    return once * (number // len(once) + 1)


def bytes_of_a_stream(parser: str, streams: int = 500, steps: int = 300) -> float:
    """What a stream holds after `steps` tokens whose events were taken, measured in this process."""
    vocabulary = load(ModelSpec(DEFAULT_NAME, DEFAULT_SOURCE))
    opener, tokens = Opener(Limits()), tokens_of(parser, steps)
    options = StreamOptions(DEFAULT_NAME, tool_parser=parser, tools_json=TOOLS)
    plan = opener.plan(options, vocabulary, "warm")
    opener.parsed(options, vocabulary, plan).feed(tokens)
    tracemalloc.start()
    alive = []
    for number in range(streams):
        stream = opener.parsed(options, vocabulary, opener.plan(options, vocabulary, f"request-{number}"))
        stream.feed(tokens)
        stream.take_events()
        alive.append(stream)
    return tracemalloc.get_traced_memory()[0] / streams


async def measure(options: argparse.Namespace, port: int, process: psutil.Process) -> str:
    """Runs a warm-up and the measured round against a service; the figures in one line."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await until_serving(channel)
        await carry(channel, options, 100)
        before, started = process.cpu_times(), time.perf_counter()
        received = await carry(channel, options, options.steps)
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
            figures = uvloop.run(measure(options, port, psutil.Process(service.pid)))
            more = f", {bytes_of_a_stream(options.parser) / 1000:.1f} kB a stream" if options.parser else ""
            print(figures + more)
        finally:
            service.terminate()


if __name__ == "__main__":
    main()
