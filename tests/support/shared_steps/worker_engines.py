"""Rigs of the steps in which requests of a worker meet: its session, its engines' steps, its text."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.common.packages.model_files import ModelSpec
from services.common.rpc.errors import from_detail
from services.postprocess.detokenize.stream import StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.engine import EngineConfig, GenerateContext, LLMEngine, Load, Sink
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from services.worker.contract.text_delta import TextUpdate
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.faults import Faults
from services.worker.engines.mock.operations import Operations
from services.worker.engines.mock.rank import Rank, Statistics
from services.worker.engines.mock.scheduler import MockScheduler
from services.worker.engines.mock.sequence import Sequence as MockSequence
from services.worker.engines.mock.text import Answer
from services.worker.engines.mock.timing import FixedTiming
from services.worker.engines.transformers.engine import TransformersEngine
from services.worker.engines.transformers.request_state import RequestState
from services.worker.engines.transformers.sizing import Plan
from services.worker.engines.transformers.step import Listener, Step, StepRow
from services.worker.engines.transformers.stepping import Stepper
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.local_processing.loading import load_texts
from services.worker.local_processing.text_sink import TextSink
from services.worker.serving import service
from services.worker.serving.session import WorkerSession
from services.worker.serving.wire import write_page
from services.worker.serving.worker import Worker
from services.worker.settings import WorkerSettings
from sluice.v1 import common_pb2, worker_pb2
from tests.support.data.loaded_tokenizers import tiny_folder, tiny_hf
from tests.support.fakes.engines import CONFIG, request
from tests.support.servers.workers import generation
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig

TOKENS = 3
PROBE = ROWS


def _row(request_id: str) -> int:
    return int(request_id.removeprefix("r"))


class _Engine(LLMEngine):
    """Keeps the sinks of its requests; submitting and aborting may fail."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault
        self.sinks: dict[int, Sink] = {}

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        return cls(Fault())

    async def start(self, worker_id: str) -> EngineConfig:
        return CONFIG

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        raise NotImplementedError
        yield

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        self._fault.at(_row(request.request_id))
        self.sinks[_row(request.request_id)] = sink

    def abort(self, context: GenerateContext) -> None:
        self._fault.at(_row(context.request_id))
        sink = self.sinks.pop(_row(context.request_id), None)
        if sink is not None:
            sink.finish(FinishReason.CANCELLED, Usage(4, TOKENS))

    async def cleanup(self) -> None:
        pass

    def load(self) -> Sequence[Load]:
        return [Load()]


class _Caller:
    """The caller of one session, which reads whole messages."""

    def __init__(self, worker: Worker) -> None:
        self.session = WorkerSession(worker, lambda: None, lambda: None)
        self.outcome = Outcome({row: [] for row in range(ROWS)})

    def send(self, starts: Sequence[int] = (), cancels: Sequence[int] = ()) -> None:
        message = worker_pb2.WorkerSessionRequest(
            starts=[worker_pb2.SessionStart(slot=row, request=generation(f"r{row}")) for row in starts],
            cancels=pack_u32(cancels),
        )
        service._apply(self.session, worker_pb2.WorkerSessionRequest.FromString(message.SerializeToString()))
        self.read()

    def read(self) -> None:
        outputs, errors = self.outcome.outputs, self.outcome.errors
        while (page := self.session.take()) is not None:
            batch = worker_pb2.TokenBatch.FromString(write_page(page, self.session.break_off).SerializeToString())
            ids, start = unpack_u32(batch.token_ids), 0
            for slot, count in zip(unpack_u32(batch.slots), unpack_u32(batch.counts), strict=True):
                outputs[slot].append(ids[start : start + count].tolist())
                start += count
            assert start == len(ids)
            for extra in batch.extras:
                assert extra.slot not in errors, "nothing follows the end"
                if extra.finish_reason == common_pb2.FINISH_REASON_ERROR:
                    errors[extra.slot] = from_detail(extra.error)
                else:
                    outputs[extra.slot].append(str(extra))

    def probe(self, engine: _Engine) -> None:
        """Runs one more request."""
        self.outcome.outputs[PROBE] = []
        self.send(starts=[PROBE])
        sink = engine.sinks.pop(PROBE)
        sink.begin(0)
        sink.push((9,))
        sink.finish(FinishReason.LENGTH, Usage(4, 1))
        self.read()
        self.outcome.alive = [9] in self.outcome.outputs.pop(PROBE)


def _position(token_id: int, rank: int = 1) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, -0.5, rank))


@rig("worker.columns")
async def columns(fault: Fault) -> Outcome:
    """Engines give values that no message can carry."""
    engine = _Engine(Fault())
    worker = Worker(engine, "w")
    await worker.start()
    caller = _Caller(worker)
    caller.send(starts=range(ROWS))
    everything: Any = object()
    for row, sink in list(engine.sinks.items()):
        bad: Callable[..., Any] = partial(_choice, fault, row)
        sink.begin(bad(2, -1), [_position(7, bad(1, -1))])
    caller.read()
    for _ in range(TOKENS):
        for row, sink in list(engine.sinks.items()):
            bad = partial(_choice, fault, row)
            sink.push(bad((5,), (everything,)))
            sink.push(bad((6, 7), (6, 1.5)), [_position(6), _position(bad(7, -7))])
        caller.read()
    for row, sink in list(engine.sinks.items()):
        bad = partial(_choice, fault, row)
        usage = Usage(4, bad(3 * TOKENS, -1), bad(2, 1 << 40))
        sink.finish(FinishReason.STOP, usage, stop_token_id=bad(7, -7), handoff=bad(b"", everything))
    engine.sinks.clear()
    caller.read()
    caller.probe(engine)
    return caller.outcome


def _choice(fault: Fault, row: int, good: Any, wrong: Any) -> Any:
    return wrong if fault.due(row) else good


class _Sink(Sink):
    """Collects one row's output; receiving may fail, except the end."""

    def __init__(self, fault: Fault, row: int, outcome: Outcome) -> None:
        self._fault, self._row, self._outcome = fault, row, outcome

    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self._fault.at(self._row)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self._fault.at(self._row)
        self._outcome.outputs[self._row].extend(token_ids)

    def finish(self, reason: FinishReason, usage: Usage, *, error: SluiceError | None = None, **rest: Any) -> None:
        assert self._row not in self._outcome.errors
        if error is not None:
            self._outcome.errors[self._row] = error
        else:
            self._outcome.outputs[self._row].append(reason)


class _Sequence(MockSequence):
    fault: Fault

    def hashes_upto(self, blocks: int, block_size: int) -> array[int]:
        self.fault.at(_row(self.request.request_id))
        return super().hashes_upto(blocks, block_size)


def _mock_steps(fault: Fault) -> Outcome:
    outcome = Outcome({row: [] for row in range(ROWS)})

    def answer(asked: GenerateRequest, limit: int) -> Answer:
        fault.at(_row(asked.request_id))
        return Answer(array("I", range(100, 100 + limit)), FinishReason.LENGTH)

    scheduler = MockScheduler(
        BlockPool(256),
        FixedTiming(1.0, 0.0),
        answer,
        block_size=4,
        max_sequences=32,
        max_batched_tokens=32,
        max_waiting=99,
    )
    operations = Operations((), Faults(), lambda: None, lambda: None)
    rank = Rank(scheduler, KvEventSource(0), operations, Statistics(), 1000, lambda sequence: b"")
    for row in range(ROWS):
        sequence = _Sequence(request(f"r{row}", prompt=[row, 20, 21, 22, 23, 1]), 9, row, _Sink(fault, row, outcome))
        sequence.fault = fault
        rank.submit(sequence, 0.0)
    for now in range(200):
        if scheduler.busy:
            rank._emit(scheduler.step(float(now)))
    pool = scheduler.pool
    outcome.alive = rank.idle.is_set() and not scheduler.busy and not pool.used
    return outcome


rig("mock.step")(_mock_steps)
rig("mock.emit")(_mock_steps)


@rig("transformers.rows")
async def transformers_rows(fault: Fault) -> Outcome:
    outcome = Outcome({row: [] for row in range(ROWS)})
    engine = TransformersEngine(WorkerSettings(model=f"tiny={tiny_folder()}"))
    dropped: list[str] = []
    runner = SimpleNamespace(drop=dropped.append, release=lambda key: None)
    engine._started = SimpleNamespace(runner=runner)  # type: ignore[assignment]
    plan: Any = SimpleNamespace(stop_ids=(7,))
    for row in range(ROWS):
        state = RequestState(str(row), request(f"r{row}"), _Sink(fault, row, outcome), plan, 9)
        engine._states_by_key[state.key] = engine._states_by_request[f"r{row}"] = state
    for number in range(TOKENS):
        first, last = 0 if number == 0 else None, number == TOKENS - 1
        engine._take(Step([StepRow(str(row), 50 + number, first, None, last) for row in range(ROWS)]))
    outcome.alive = not engine._states_by_key and sorted(map(int, dropped)) == sorted(outcome.errors)
    return outcome


class _Turn:
    """Computes one row's tokens, which may fail."""

    def __init__(self, fault: Fault, row: int) -> None:
        self._fault, self._row = fault, row

    def next(self) -> tuple[int, None]:
        self._fault.at(self._row)
        return 50, None

    def forget(self) -> None:
        pass


@rig("transformers.turns")
def transformers_turns(fault: Fault) -> Outcome:
    outcome = Outcome({row: [] for row in range(ROWS)})

    def take(step: Step) -> None:
        for row in step.rows:
            outcome.outputs[int(row.key)].append((row.token_id, row.ended))
        for key, error in step.failed:
            assert isinstance(error, SluiceError)
            outcome.errors[int(key)] = error

    def begin(batch_request: Any, token_ids: list[int]) -> _Turn:
        return _Turn(fault, token_ids[0])

    stepper = Stepper(begin, Plan(16, 256, 512, 32), Listener(take, lambda: None, lambda phase: None))
    for row in range(ROWS):
        sampler = SimpleNamespace(plan=SimpleNamespace(stop_ids=()), constraint=None, error=None)
        stepper.add(str(row), SimpleNamespace(sampler=sampler), [row], TOKENS)  # type: ignore[arg-type]
    while stepper._running or stepper._waiting:
        stepper._round()
    outcome.alive = stepper.fatal_error is None
    return outcome


class _TextTarget(ResponseSink):
    """Collects one row's tokens and text; receiving text may fail."""

    def __init__(self, fault: Fault, row: int, outcome: Outcome) -> None:
        super().__init__()
        self._fault, self._row, self._outcome = fault, row, outcome

    def deliver_first(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        pass

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self.delivered += len(token_ids)
        self._outcome.outputs[self._row].extend(token_ids)

    def deliver_text(self, text: TextUpdate) -> None:
        self._fault.at(self._row)
        self._outcome.outputs[self._row].append(str(text.events))

    def deliver_terminal(self, delta: Delta) -> None:
        if delta.error is not None:
            self._outcome.errors[self._row] = delta.error


@rig("worker.texts")
async def texts(fault: Fault) -> Outcome:
    outcome = Outcome({row: [] for row in range(ROWS)})
    spec = ModelSpec("tiny", str(tiny_folder()))
    detokenizer, factory = await load_texts(spec, ParserNames(), lambda name, error: None)
    params = SinkParams(lambda *_: None, lambda sink, rule: None)
    sinks: dict[int, TextSink] = {}
    slots: dict[int, int] = {}
    for row in range(ROWS):
        asked = GenerateRequest(f"r{row}", "tiny", array("I", [0, 20, 21, 1]), text_out=StreamOptions("tiny"))
        target = _TextTarget(fault, row, outcome)
        target.accept(GenerateContext(f"r{row}"), 4, params, None)
        sinks[row] = sink = detokenizer.open(asked, target, params, lambda: None)
        slots[sink.slot] = row
        sink.begin(0)
    session = detokenizer._session
    with mock.patch.object(session, "end", fault.wrap(session.end, lambda slot, *rest: slots[slot])):
        for token_id in tiny_hf().encode_text("Tell me of rivers."):
            for sink in sinks.values():
                sink.push((token_id,))
            await asyncio.sleep(0)
        for sink in sinks.values():
            sink.finish(FinishReason.STOP, Usage(4, 5))
        await asyncio.sleep(0.01)
    outcome.alive = len(detokenizer) == 0 and detokenizer._session is session
    await detokenizer.close()
    await factory.close()
    return outcome
