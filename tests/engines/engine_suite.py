"""What every real engine is held to, as functions over a description of the engine.

An engine's test module describes it once (`EngineUnderTest`), starts `python -m services.worker` in the engine's own
environment with `running`, and calls the cases below; each talks gRPC and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from services.common.packing import pack_u32
from services.common.rpc.channels import open_channel
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
CALL_S = 300
# Prompts have tests of their own; without them a start needs no second import of the engine.
WORKER_ENV = {"SLUICE_WORKER_LOG_FORMAT": "text", "SLUICE_WORKER_PROCESSING": "none"}


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine and where it runs.

    Attributes:
        name: as `--engine` takes it.
        python: interpreter of its environment.
        model: folder it serves, under the name "tiny".
        flags: of the worker, beside engine, model and listen.
        env: of the worker, beside this process's.
        offline: command (after `python`) that answers one JSON document with what the engine's own library makes of it:
            in {"model", "prompts", "max_tokens", "logprobs"?, "embed"?}, out {"outputs": [{"token_ids", "logprobs"?}],
            "embeddings"?}; logprobs is a list per token of {id: logprob}.
        start_s: seconds a start may take.
        quiet_s: seconds within which the load must be back at zero.
    """

    name: str
    python: str
    model: Path
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    offline: tuple[str, ...] = ()
    start_s: float = 900
    quiet_s: float = 30


@dataclass
class RunningWorker:
    """A worker's process and a stub to it."""

    process: asyncio.subprocess.Process
    address: str
    stub: worker_pb2_grpc.WorkerAsyncStub
    log: list[str]

    async def info(self) -> worker_pb2.GetInfoResponse:
        """GetInfo, answered."""
        return await self.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=CALL_S)

    async def claims(self) -> frozenset[str]:
        """Capabilities on the card."""
        return frozenset((await self.info()).card.capabilities)

    async def idle(self, within_s: float) -> worker_pb2.GetInfoResponse:
        """Waits until no request runs or waits and no block is held; AssertionError with the load when that lasts."""
        deadline = time.monotonic() + within_s
        while True:
            info = await self.info()
            load = info.load
            if not (load.running_requests or load.waiting_requests or load.used_blocks or load.prefill_tokens):
                return info
            assert time.monotonic() < deadline, f"still busy: {load}"
            await asyncio.sleep(0.05)


def interpreter(environment: str) -> str:
    """The interpreter of an engine's environment; as in `servers.python`, with dashes in names read as underscores."""
    variable = f"SLUICE_TEST_{environment.upper().replace('-', '_')}_PYTHON"
    found = Path(os.environ.get(variable) or ROOT / ".venv-engines" / environment / "bin" / "python")
    assert found.exists(), f"{found} is missing; `make test-engines` makes it"
    return str(found)


@asynccontextmanager
async def running(engine: EngineUnderTest, *flags: str) -> AsyncIterator[RunningWorker]:
    """The worker as a process, ready to serve; killed with its children at the end if it still lives."""
    process = await asyncio.create_subprocess_exec(
        *(engine.python, "-m", "services.worker", "--engine", engine.name),
        *("--model", f"tiny={engine.model}", "--listen", "127.0.0.1:0", *engine.flags, *flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=engine.model,
        env={**os.environ, **WORKER_ENV, **engine.env, "PYTHONPATH": _python_path(engine)},
        limit=1 << 20,
    )
    log: list[str] = []
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read_log(process, log, ready))
    try:
        try:
            async with asyncio.timeout(engine.start_s):
                address = await ready
        except TimeoutError:
            raise AssertionError("the worker does not start:\n" + "\n".join(log[-40:])) from None
        channel = open_channel(address)
        try:
            yield RunningWorker(process, address, worker_pb2_grpc.WorkerStub(channel), log)
        except BaseException as error:
            error.add_note("the worker said:\n" + "\n".join(log[-40:]))
            raise
        finally:
            await channel.close()
    finally:
        await _end(process)
        await reading


async def offline(engine: EngineUnderTest, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine's own library answers, in a process of its own."""

    def ask() -> dict[str, Any]:
        done = subprocess.run(
            [engine.python, *engine.offline],
            input=json.dumps({"model": str(engine.model), **question}),
            capture_output=True,
            text=True,
            timeout=engine.start_s,
            cwd=engine.model,
            env={**os.environ, **engine.env, "PYTHONPATH": _python_path(engine)},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return await asyncio.to_thread(ask)


def request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 16, *, ignore_eos: bool = True, **fields: Any
) -> worker_pb2.GenerateRequest:
    """A greedy request that runs to its length; keywords are fields of GenerateRequest."""
    defaults: dict[str, Any] = {
        "sampling": common_pb2.SamplingOptions(temperature=0.0),
        "stop": common_pb2.StopOptions(max_tokens=max_tokens, ignore_eos=ignore_eos),
    }
    return worker_pb2.GenerateRequest(
        request_id=request_id,
        model="tiny",
        tokens=worker_pb2.TokenPrompt(token_ids=pack_u32(prompt)),
        **{**defaults, **fields},
    )


def prompts(count: int, least: int = 5, most: int = 60, seed: int = 7, vocab_size: int = 500) -> list[list[int]]:
    """Random prompts of plain ids; the same for equal arguments."""
    source = random.Random(seed)
    return [[source.randrange(10, vocab_size) for _ in range(source.randint(least, most))] for _ in range(count)]


def _python_path(engine: EngineUnderTest) -> str:
    """The repository first: `services` and `sluice` are not installed in an engine's environment."""
    return os.pathsep.join(filter(None, (str(ROOT), engine.env.get("PYTHONPATH"))))


async def _read_log(process: asyncio.subprocess.Process, log: list[str], ready: asyncio.Future[str]) -> None:
    assert process.stderr is not None
    address = ""
    while raw := await process.stderr.readline():  # empty lines are lines, too: progress bars write them
        line = raw.decode(errors="replace").rstrip()
        log.append(line)
        del log[:-500]
        if "gRPC server listens" in line:
            address = line.split("address=")[1].split()[0]
        if "engine is ready" in line and not ready.done():
            ready.set_result(address)
    if not ready.done():
        ready.set_exception(AssertionError("the worker ended:\n" + "\n".join(log[-40:])))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a worker and what it started, by pid."""
    if process.returncode is not None:
        return
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends by itself just now
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
    try:
        async with asyncio.timeout(20):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    for child in children:
        if child.is_running():
            child.kill()
