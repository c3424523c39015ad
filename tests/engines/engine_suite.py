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
import re
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import psutil

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32, unpack_u32
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_detail, from_rpc_error
from sluice.v1 import common_pb2, router_pb2, worker_pb2, worker_pb2_grpc
from tests.support.servers.router_child import RouterChild
from tests.support.servers.workers import Caller

ROOT = Path(__file__).resolve().parents[2]
CALL_S = 300
NOTICED_S = 2.0
STALL_TICK_S = 0.02
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


class PatientCaller(Caller):
    """A session with an engine that may take its time, for tasks that write at once."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        super().__init__(stub)
        self._writing = asyncio.Lock()

    async def send(
        self, starts: dict[int, worker_pb2.GenerateRequest] | None = None, cancels: Sequence[int] = ()
    ) -> None:
        async with self._writing:  # grpc takes one write at a time
            await super().send(starts, cancels)

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(CALL_S):
            while not condition():
                if self._reading.done():
                    self._reading.result()
                self._changed.clear()
                await self._changed.wait()


class Stalls:
    """While entered, measures how late this process wakes up, which deadlines on a busy machine must allow for."""

    def __init__(self) -> None:
        self._worst = 0.0

    def allow(self, seconds: float) -> float:
        """The deadline, and ten wake-ups: about as many as lie between a process' death and who hears of it."""
        return seconds + 10 * self._worst

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(STALL_TICK_S)
            self._worst = max(self._worst, time.monotonic() - before - STALL_TICK_S)

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()


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


@dataclass
class Answer:
    """All deltas of one generation."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    terminal: worker_pb2.TokenExtra | None = None


async def generate(worker: RunningWorker, message: worker_pb2.GenerateRequest) -> Answer:
    """One generation by the server-streaming twin; SluiceError when it is refused."""
    answer = Answer()
    try:
        async for delta in worker.stub.Generate(message, timeout=CALL_S):
            assert answer.terminal is None, "something after the terminal delta"
            answer.token_ids += unpack_u32(delta.token_ids)
            answer.logprobs += delta.extra.logprobs
            answer.prompt_logprobs += delta.extra.prompt_logprobs
            if delta.extra.HasField("cached_tokens"):
                assert answer.cached_tokens is None, "cached_tokens twice"
                answer.cached_tokens = delta.extra.cached_tokens
            if delta.extra.finish_reason:
                answer.terminal = delta.extra
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "worker") from error
    assert answer.terminal is not None, "no terminal delta"
    return answer


def prompts(count: int, least: int = 5, most: int = 60, seed: int = 7, vocab_size: int = 500) -> list[list[int]]:
    """Random prompts of plain ids; the same for equal arguments."""
    source = random.Random(seed)
    return [[source.randrange(10, vocab_size) for _ in range(source.randint(least, most))] for _ in range(count)]


async def greedy_equals_offline(engine: EngineUnderTest, worker: RunningWorker, count: int = 8) -> None:
    """Together and one by one, each prompt gives the tokens that the engine's own library gives."""
    asked = prompts(count)
    expected = [one["token_ids"] for one in (await offline(engine, {"prompts": asked, "max_tokens": 24}))["outputs"]]
    together = await asyncio.gather(
        *(generate(worker, request(f"together-{index}", prompt, 24)) for index, prompt in enumerate(asked))
    )
    assert [answer.token_ids for answer in together] == expected
    for index, prompt in enumerate(asked[:2]):
        answer = await generate(worker, request(f"alone-{index}", prompt, 24))
        assert answer.token_ids == expected[index]
        assert answer.terminal is not None
        assert answer.terminal.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert answer.terminal.usage.prompt_tokens == len(prompt)
        assert answer.terminal.usage.completion_tokens == 24


async def random_cancels_leak_nothing(engine: EngineUnderTest, worker: RunningWorker, count: int = 500) -> None:
    """Requests cancelled at random moments (some before they began, some after they ended) leave nothing behind."""
    source = random.Random(count)
    caller = PatientCaller(worker.stub)
    live: asyncio.Semaphore = asyncio.Semaphore(24)

    async def one(slot: int, prompt: list[int]) -> None:
        async with live:
            await caller.send({slot: request(f"cancel-{slot}", prompt, source.randint(1, 60))})
            await asyncio.sleep(source.choice((0, 0.001, 0.02, 0.1, 0.3)))
            await caller.send(cancels=[slot])
            await caller.ended(slot)

    try:
        await asyncio.gather(*(one(slot, prompt) for slot, prompt in enumerate(prompts(count, 1, 120, seed=5))))
        reasons = {terminal.finish_reason for terminal in caller.terminals.values()}
        assert len(caller.terminals) == count
        assert reasons <= {common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_LENGTH}
        assert common_pb2.FINISH_REASON_CANCELLED in reasons
    finally:
        await caller.close()
    await worker.idle(engine.quiet_s)
    assert len((await generate(worker, request("after", [20, 21, 22], 4))).token_ids) == 4


async def logprobs_equal_offline(engine: EngineUnderTest, worker: RunningWorker, tolerance: float = 1e-3) -> None:
    """Chosen tokens and alternatives have the log-probabilities the engine's own library reports."""
    asked = prompts(3, seed=21)
    expected = await offline(engine, {"prompts": asked, "max_tokens": 8, "logprobs": 5})
    for index, (prompt, reference) in enumerate(zip(asked, expected["outputs"], strict=True)):
        message = request(f"logprobs-{index}", prompt, 8, output=common_pb2.OutputOptions(logprobs=3))
        answer = await generate(worker, message)
        assert answer.token_ids == reference["token_ids"]
        assert len(answer.logprobs) == 8
        for position, theirs in zip(answer.logprobs, reference["logprobs"], strict=True):
            assert position.chosen.rank == 1
            assert len(position.top) >= 3
            values = [one.logprob for one in position.top]
            assert values == sorted(values, reverse=True)
            for one in (position.chosen, *position.top):
                if (known := theirs.get(str(one.token_id))) is not None:
                    assert abs(one.logprob - known) < tolerance
            assert str(position.chosen.token_id) in theirs


async def embeddings_equal_offline(engine: EngineUnderTest, worker: RunningWorker, tolerance: float = 1e-3) -> None:
    """Vectors are the library's own, of length one where the model says so, and cut on request."""
    asked = prompts(4, seed=31)
    expected = (await offline(engine, {"prompts": asked, "max_tokens": 1, "embed": True}))["embeddings"]
    inputs = [worker_pb2.TokenPrompt(token_ids=pack_u32(prompt)) for prompt in asked]
    reply = await worker.stub.Embed(
        worker_pb2.EmbedRequest(request_id="embed", model="tiny", inputs=inputs), timeout=CALL_S
    )
    for vector, theirs in zip(reply.embeddings, expected, strict=True):
        ours = array("f")
        ours.frombytes(vector.values)
        assert len(ours) == len(theirs)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < tolerance
        assert abs(sum(value * value for value in ours) - 1) < 1e-3
    assert reply.usage.prompt_tokens == sum(map(len, asked))


async def prompt_logprobs_cover_the_prompt(worker: RunningWorker) -> None:
    """What the second of two requests generated has, as a prompt, the log-probabilities it had as output."""
    (prompt,) = prompts(1, 12, 12, seed=61)
    first = await generate(worker, request("scored", prompt, 6, output=common_pb2.OutputOptions(logprobs=1)))
    again = [*prompt, *first.token_ids]
    second = await generate(worker, request("rescored", again, 2, output=common_pb2.OutputOptions(prompt_logprobs=1)))
    scored = list(second.prompt_logprobs)[len(prompt) - len(again) :]
    assert [one.chosen.token_id for one in scored] == first.token_ids
    for ours, theirs in zip(scored, first.logprobs, strict=True):
        assert abs(ours.chosen.logprob - theirs.chosen.logprob) < 1e-3


async def adapters_equal_offline(
    engine: EngineUnderTest, worker: RunningWorker, adapters: Mapping[str, Path], base: str = "tiny"
) -> None:
    """Requests of several adapters and of the base model in one batch each get what that adapter alone gives.

    Args:
        adapters: by name, with the folder the offline command merges ("adapter" in its question).
        base: how the model itself is called.
    """
    asked = prompts(2, seed=71)
    expected = {base: await offline(engine, {"prompts": asked, "max_tokens": 12})}
    for name, folder in adapters.items():
        expected[name] = await offline(engine, {"prompts": asked, "max_tokens": 12, "adapter": str(folder)})

    async def one(name: str, index: int) -> tuple[str, int, list[int]]:
        lora = "" if name == base else name
        answer = await generate(worker, request(f"lora-{name}-{index}", asked[index], 12, lora=lora))
        return name, index, answer.token_ids

    answers = await asyncio.gather(*(one(name, index) for name in expected for index in range(len(asked))))
    for name, index, token_ids in answers:
        assert token_ids == expected[name]["outputs"][index]["token_ids"], name
    assert len({tuple(token_ids) for _, index, token_ids in answers if index == 0}) == len(expected)


async def events_reach_a_router_and_routing_follows(engine: EngineUnderTest, folder: Path) -> None:
    """Of two workers, the router picks the one that holds the prompt, knows how much of it, and hears of its loss.

    Args:
        folder: for the router's log.
    """
    router = RouterChild(folder)
    await router.start()
    join = ("--routers", f"127.0.0.1:{router.port}")
    try:
        async with running(engine, *join, "--worker-id", "a") as a, running(engine, *join, "--worker-id", "b") as b:
            size = (await a.info()).card.block_size
            for name, worker in (("a", a), ("b", b)):
                prompt = prompts(1, 4 * size + 3, 4 * size + 3, seed=ord(name))[0]
                await generate(worker, request(f"routed-{name}", prompt, 2))
                await until_routed(router, prompt, (name, 4))
            if "clear_cache" in await b.claims():
                clear = worker_pb2.ControlRequest(action=worker_pb2.ControlRequest.ACTION_CLEAR_CACHE)
                await b.stub.Control(clear, timeout=CALL_S)
                await until_routed(router, prompt, (None, 0))
    finally:
        await router.stop()


async def until_routed(router: RouterChild, prompt: Sequence[int], expected: tuple[str | None, int]) -> None:
    """Waits until the router finds this many blocks of the prompt, at this worker (None: at any)."""
    query = router_pb2.RouteQueryRequest(model="tiny", prompt=router_pb2.PromptRef(token_ids=pack_u32(prompt)))
    deadline = time.monotonic() + 30
    while True:
        try:
            answer = await router.stub.RouteQuery(query, timeout=CALL_S)
            found = (answer.decode.worker_id, answer.best_overlap_blocks)
            if found[1] == expected[1] and expected[0] in (None, found[0]):
                return
        except grpc.aio.AioRpcError as error:
            found = (error.details() or "", -1)
        assert time.monotonic() < deadline, f"the router answers {found}, not {expected}"
        await asyncio.sleep(0.05)


async def bad_grammars_are_refused_and_serving_goes_on(worker: RunningWorker) -> None:
    """Patterns and schemas that cannot be compiled are typed errors that name the constraint, also beside others."""
    open_pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    kind = common_pb2.GuidedDecoding
    wrong = [
        kind(regex="("),
        kind(regex="[z-a]"),
        kind(json_schema=json.dumps(open_pattern)),
        kind(json_schema=json.dumps({"type": "string", "pattern": "a\x00("})),
    ]

    async def refused(index: int) -> None:
        answer = await generate(worker, request(f"bad-grammar-{index}", [20, 21], guided=wrong[index]))
        assert answer.terminal is not None
        assert answer.terminal.finish_reason == common_pb2.FINISH_REASON_ERROR
        error = from_detail(answer.terminal.error)
        assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "response_format"), error.message
        assert "Traceback" not in error.message

    good, *_ = await asyncio.gather(generate(worker, request("beside", [20, 21], 30)), *map(refused, range(len(wrong))))
    assert good is not None
    assert len(good.token_ids) == 30


async def sigterm_lets_running_requests_finish(engine: EngineUnderTest, live: int = 16) -> None:
    """With a grace period and a drain, every request that runs at SIGTERM ends as it would have, and the exit is 0."""
    async with running(engine, "--grace-s", "1", "--drain-s", "60") as worker:
        caller = PatientCaller(worker.stub)
        try:
            asked = prompts(live, seed=41)
            await caller.send({slot: request(f"term-{slot}", prompt, 200) for slot, prompt in enumerate(asked)})
            await caller.began(*range(live))
            worker.process.send_signal(signal.SIGTERM)
            await caller.ended(*range(live))
            reasons = [caller.terminals[slot].finish_reason for slot in range(live)]
            assert reasons == [common_pb2.FINISH_REASON_LENGTH] * live
            assert all(len(caller.token_ids[slot]) == 200 for slot in range(live))
        finally:
            await caller.close()
        async with asyncio.timeout(engine.start_s):
            assert await worker.process.wait() == 0, "\n".join(worker.log[-40:])


async def killed_helper_is_noticed(engine: EngineUnderTest, helper: Callable[[psutil.Process], bool]) -> None:
    """After kill -9 of the engine's own process, running requests hear a retryable error within 2 s; the worker ends.

    Args:
        engine: one that computes in child processes.
        helper: tells the child to kill.
    """
    async with running(engine) as worker:
        children = psutil.Process(worker.process.pid).children(recursive=True)
        victim = next(child for child in children if helper(child))
        caller = PatientCaller(worker.stub)
        try:
            slots = await _far_from_their_end(caller, victim)
            async with Stalls() as stalls:
                killed = time.monotonic()
                victim.kill()
                await caller.ended(*slots)
                assert time.monotonic() - killed < stalls.allow(NOTICED_S)
            for slot in slots:
                assert caller.terminals[slot].finish_reason == common_pb2.FINISH_REASON_ERROR
                assert caller.terminals[slot].error.kind == int(ErrorKind.ENGINE_SHUTDOWN)
                assert caller.terminals[slot].error.retryable
        finally:
            await caller.close()
        async with asyncio.timeout(CALL_S):
            assert await worker.process.wait() != 0


async def _far_from_their_end(
    caller: PatientCaller, stopped: psutil.Process | None = None, live: int = 4, length: int = 1900
) -> list[int]:
    """The slots of requests that run.

    Args:
        stopped: the process that computes. An engine may be done before this process, on a busy machine, hears of it:
            so it is stopped once they have begun.
    """
    for attempt, asked in enumerate(prompts(live, seed=seed) for seed in range(51, 61)):
        starts = {attempt * live + at: request(f"long-{attempt}-{at}", each, length) for at, each in enumerate(asked)}
        await caller.send(starts)
        await caller.began(*starts)
        if stopped is not None:
            stopped.suspend()
        counts: list[int] = []
        while counts != (counts := [len(caller.token_ids[slot]) for slot in starts]):
            await asyncio.sleep(0.3 if stopped else 0.05)  # what has come meanwhile is read
            if stopped is None:
                break
        if all(len(caller.token_ids[slot]) < length / 2 for slot in starts):
            return list(starts)
        if stopped is not None:
            stopped.resume()
        await caller.ended(*starts)
    raise AssertionError("ten times the requests were nearly done when this process heard that they had begun")


async def refused_start(engine: EngineUnderTest, *flags: str, model: Path | None = None) -> str:
    """Starts a worker that must not start; its last words, which are one sentence, after a non-zero exit.

    What vLLM's own processes log before is theirs.
    """
    process = await asyncio.create_subprocess_exec(
        *(engine.python, "-m", "services.worker", "--engine", engine.name),
        *("--model", f"tiny={model or engine.model}", "--listen", "127.0.0.1:0", *engine.flags, *flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **WORKER_ENV, **engine.env, "PYTHONPATH": _python_path(engine)},
    )
    try:
        async with asyncio.timeout(engine.start_s):
            _, errors = await process.communicate()
    finally:
        await _end(process)
    text = errors.decode()
    assert process.returncode not in (0, None), text
    assert "Traceback" not in text or engine.name in ("vllm", "vllm-grpc"), text
    crash_reason = [line for line in text.splitlines() if " services.common.rpc.runner " in line]
    assert len(crash_reason) == 1, text
    return crash_reason[0]


async def conformance(worker: RunningWorker, watcher: str, within_s: float) -> tuple[int, int]:
    """Runs the conformance kit, which must find no violation and then stops the worker.

    Args:
        watcher: address of the router that the kit plays; the worker registers there.

    Returns:
        The number of rules that pass, and of those that were not checked.
    """
    kit = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("sluice")), "conformance", worker.address, "--patience", "5"),
        *("--router-listen", watcher, "--stop-command", f"kill {worker.process.pid}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )
    async with asyncio.timeout(within_s):
        output = (await kit.communicate())[0].decode()
    assert kit.returncode == 0, output
    (passed, not_checked), *_ = re.findall(r"(\d+) pass, 0 fail.* (\d+) not checked", output)
    return int(passed), int(not_checked)


async def checks_inside(engine: EngineUnderTest, script: str, *arguments: str) -> None:
    """Runs a script of this folder with the engine's interpreter and model; it must end with "ok"."""
    process = await asyncio.create_subprocess_exec(
        *(engine.python, "-P", str(Path(__file__).with_name(script)), str(engine.model), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **engine.env, "PYTHONPATH": str(ROOT)},
    )
    async with asyncio.timeout(engine.start_s):
        output, errors = await process.communicate()
    assert output.decode().strip().endswith("ok"), errors.decode()[-4000:]


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
