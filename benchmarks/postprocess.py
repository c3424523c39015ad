"""What a token costs in postprocess: one real process, one session, many streams, CPU as the system counts it.

    python benchmarks/postprocess.py [--streams 256] [--steps 2000] [--stop TEXT ...] [--parser NAME] [--processes 1]
    python benchmarks/postprocess.py --matrix [--vllm-python PYTHON] [--sglang-python PYTHON]

Every message carries one token for every stream, as a worker's engine step does. `--in-flight` messages are under way
at a time. The client does not look at the text. With --parser the streams say tool calls of that format, one after the
other, and what a stream costs in memory is told as well. With --processes there are as many services, each with its own
client process and its own streams. With --matrix it measures plain text, stop strings and every family of parsers at 1,
32, 256 and 1,024 streams and prints tables; families of an engine's own parsers need its interpreter, and their
processes' CPU counts.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import grpc
import psutil
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from services.common.base.packing import pack_u32
from services.common.net.ports import free_port
from services.common.packages.model_files import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec, resolve
from services.common.rpc.channels import open_channel
from services.postprocess.detokenize.stream import Limits, Stream, StreamOptions
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.vocabulary_registry import load
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
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nMünchen\n</parameter>\n<parameter=text>\n"
    "The quick brown fox jumps over the lazy dog, while it rains\n</parameter>\n</function>\n</tool_call>\n",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>München</arg_value>\n"
    "<arg_key>text</arg_key>\n<arg_value>The quick brown fox jumps over the lazy dog, while it rains</arg_value>\n"
    "</tool_call>\n",
    "kimi_k2": f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|><|start|>assistant",
}
CALLS["vllm:hermes"] = CALLS["sglang:qwen25"] = CALLS["hermes"]
ANSWERED = 1_000 + ord("x")  # a token of the default vocabulary that is text by itself
START_S = 300.0
STUCK_S = 300.0
STOPS = ["\n\nHuman:", "<|endoftext|>"]
TOOLS = b'[{"type": "function", "function": {"name": "get_weather"}}]'


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000, help="tokens of each stream")
    parser.add_argument("--in-flight", type=int, default=4, help="messages sent ahead of their answers")
    parser.add_argument("--stop", action="append", default=[], help="stop string of every stream, repeatable")
    parser.add_argument("--parser", choices=sorted(CALLS), default="", help="tool parser of every stream")
    parser.add_argument("--processes", type=int, default=1, help="services at the same time")
    parser.add_argument("--vllm-python", default="", help="interpreter that has vllm, for vllm:hermes")
    parser.add_argument("--sglang-python", default="", help="interpreter that has sglang, for sglang:qwen25")
    parser.add_argument("--tokens", type=int, default=400_000, help="of a cell of plain text with --matrix")
    parser.add_argument("--matrix", action="store_true", help="measure all of it")
    return parser.parse_args()


async def until_serving(channel: grpc.aio.Channel, service: psutil.Process) -> None:
    """Waits for the service; an engine's package may take minutes to import on a busy machine."""
    health = health_pb2_grpc.HealthStub(channel)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if service.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit("the service has ended; what it said is above")
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest())
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
        except grpc.aio.AioRpcError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit(f"the service did not become healthy within {START_S:.0f} s")


async def carry(channel: grpc.aio.Channel, options: argparse.Namespace, steps: int) -> int:
    """Sends `steps` messages with a token for each stream; returns the code points that came back."""
    keeper = [ANSWERED] if options.parser or options.stop else []
    streams = options.streams + len(keeper)
    ids = tokens_of(options.parser, steps + streams)
    slots, counts = pack_u32(range(streams)), pack_u32([1] * streams)
    call = postprocess_pb2_grpc.PostprocessStub(channel).Session()
    plain = postprocess_pb2.StreamOptions(model=DEFAULT_NAME)
    wanted = postprocess_pb2.StreamOptions(
        model=DEFAULT_NAME, stop=options.stop, tool_parser=options.parser, tools_json=TOOLS if options.parser else b""
    )
    opens = [postprocess_pb2.OpenStream(slot=slot, options=wanted) for slot in range(options.streams)]
    if keeper:  # has an answer to every message, whatever the others hold back
        opens.append(postprocess_pb2.OpenStream(slot=options.streams, options=plain))
    await call.write(postprocess_pb2.PostSessionRequest(opens=opens))
    credits = asyncio.Semaphore(options.in_flight)
    received, marks = 0, Counter[str]()

    async def read() -> None:
        nonlocal received
        while isinstance(batch := await call.read(), postprocess_pb2.TextBatch):
            received += len(batch.text)
            for event in batch.events:
                received += len(event.text) + sum(len(call.arguments) for call in event.tool_calls)
                marks[event.degraded] += 1
            credits.release()

    reading = asyncio.create_task(read())
    for step in range(steps):
        await credits.acquire()
        columns = postprocess_pb2.TokenColumns(
            slots=slots, counts=counts, token_ids=pack_u32([*ids[step : step + options.streams], *keeper])
        )
        await call.write(postprocess_pb2.PostSessionRequest(tokens=columns))
    # All is answered at the end, also what parsers in other processes have not said yet.
    ends = [postprocess_pb2.EndStream(slot=slot) for slot in range(streams)]
    await call.write(postprocess_pb2.PostSessionRequest(ends=ends))
    await call.done_writing()
    await reading
    if lost := [mark for mark in marks if mark.startswith("parser_")]:
        raise SystemExit(f"streams lost their parser, so this measures nothing: {lost}")
    return received


def tokens_of(parser: str, number: int) -> list[int]:
    """So many tokens of plain text, or of tool calls in a parser's format."""
    tokenizer = Tekkenizer.from_file(resolve(DEFAULT_SOURCE))
    once = tokenizer.encode(CALLS[parser], bos=False, eos=False)
    return once * (number // len(once) + 1)


def bytes_of_a_stream(parser: str, streams: int = 500, steps: int = 300) -> float:
    """What a stream holds after `steps` tokens whose events were taken, measured in this process."""
    vocabulary = load(ModelSpec(DEFAULT_NAME, DEFAULT_SOURCE))
    opener, tokens = StreamFactory(Limits()), tokens_of(parser, steps)[:steps]
    options = StreamOptions(DEFAULT_NAME, tool_parser=parser, tools_json=TOOLS)
    plan = opener.plan(options, vocabulary, "warm")
    opener.begin(options, vocabulary, plan).feed(tokens_of(parser, 300))
    tracemalloc.start()
    alive = []
    for number in range(streams):
        stream = opener.begin(options, vocabulary, opener.plan(options, vocabulary, f"request-{number}"))
        stream.feed(tokens)
        if not isinstance(stream, Stream):
            stream.take_events()
        alive.append(stream)
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return traced / streams


def cpu_of(service: psutil.Process) -> float:
    """CPU seconds of a service and of the processes of its parsers."""
    times = [process.cpu_times() for process in (service, *service.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def measure(options: argparse.Namespace, port: int, process: psutil.Process) -> dict[str, float]:
    """Runs a warm-up and the measured round against a service."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await until_serving(channel, process)
        async with asyncio.timeout(STUCK_S):
            await carry(channel, options, 100)
            before, started = cpu_of(process), time.perf_counter()
            received = await carry(channel, options, options.steps)
        wall, cpu = time.perf_counter() - started, cpu_of(process) - before
    tokens = options.streams * options.steps
    assert received
    return {"tokens_s": tokens / wall, "cpu_us": cpu / tokens * 1e6, "resident_mib": process.memory_info().rss / 2**20}


def flags_of(options: argparse.Namespace) -> list[str]:
    """What the service needs for the parser; SGLang reads no Tekken file, so engines get the same ids from a folder."""
    engine = options.parser.partition(":")[0] if ":" in options.parser else ""
    if not engine:
        return []
    python = getattr(options, f"{engine}_python")
    if not python:
        raise SystemExit(f"--parser {options.parser} needs --{engine}-python")
    return [
        f"--models={DEFAULT_NAME}={hugging_face_folder()}",
        f"--tool-parsers={DEFAULT_NAME}={options.parser}",
        f"--{engine}-python={python}",
    ]


@cache
def hugging_face_folder() -> Path:
    """The default model's vocabulary as a tokenizer.json."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.support.data.big_vocabulary import build_big_model

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return build_big_model(folder)


def run_one(options: argparse.Namespace) -> dict[str, float]:
    """Starts a service, measures it and stops it."""
    port = free_port()
    command = [sys.executable, "-m", "services.postprocess", "--listen", f"127.0.0.1:{port}", "--log-level", "error"]
    with subprocess.Popen([*command, *flags_of(options)]) as service:
        try:
            return uvloop.run(measure(options, port, psutil.Process(service.pid)))
        finally:
            service.terminate()


def run(options: argparse.Namespace) -> dict[str, float]:
    """The same for several services at once: tokens a second together, CPU a token on average."""
    if options.processes == 1:
        return run_one(options)
    with ProcessPoolExecutor(options.processes) as pool:
        found = list(pool.map(run_one, [options] * options.processes))
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    return {**mean, "tokens_s": mean["tokens_s"] * len(found)}


def matrix(options: argparse.Namespace) -> None:
    """Prints the tables of the README."""
    engines = [name for name in CALLS if ":" in name and getattr(options, f"{name.partition(':')[0]}_python")]
    families = ["", *[name for name in CALLS if name and ":" not in name], *engines]
    print("| what | streams | CPU µs a token | tokens/s |\n| --- | --- | --- | --- |")
    for parser, stop in [("", []), ("", STOPS), *((family, []) for family in families if family)]:
        for streams in (1, 32, 256, 1024):
            # Fewer messages with more streams: each cell is a few seconds.
            steps = min(2_000, max(40, options.tokens // (4 if parser else 1) // streams))
            one = argparse.Namespace(
                **{**vars(options), "parser": parser, "stop": stop, "streams": streams, "steps": steps}
            )
            figures = run_one(one)
            name = f"`{parser}`" if parser else "stop strings" if stop else "plain text"
            print(f"| {name} | {streams:,} | {figures['cpu_us']:.2f} | {figures['tokens_s']:,.0f} |", flush=True)
    print("\n| processes | tokens/s together |\n| --- | --- |")
    for processes in (1, 2, 4):
        one = argparse.Namespace(
            **{**vars(options), "parser": "", "streams": 256, "steps": 1_000, "processes": processes}
        )
        print(f"| {processes} | {run(one)['tokens_s']:,.0f} |", flush=True)
    print("\n| stream | kB idle | kB after 300 tokens |\n| --- | --- | --- |")
    for parser in ("", "hermes", "qwen3_coder", "harmony"):
        idle, active = bytes_of_a_stream(parser, steps=0), bytes_of_a_stream(parser)
        print(f"| {parser or 'plain'} | {idle / 1000:.1f} | {active / 1000:.1f} |", flush=True)


def main() -> None:
    """Measures what the command line asks for."""
    options = arguments()
    if options.matrix:
        matrix(options)
        return
    figures = run(options)
    print(
        f"{figures['tokens_s']:,.0f} tokens/s, {figures['cpu_us']:.2f} µs CPU a token, "
        f"{figures['resident_mib']:.0f} MiB resident"
    )
    if ":" not in options.parser:
        idle, active = bytes_of_a_stream(options.parser, steps=0), bytes_of_a_stream(options.parser)
        print(f"{idle / 1000:.1f} kB a stream that is idle, {active / 1000:.1f} kB after 300 tokens")


if __name__ == "__main__":
    main()
