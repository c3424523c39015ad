"""The turns of requests whose model computes one sequence at a time, with sequences that count."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.base.errors import STEP_FAILED, ErrorKind, SluiceError
from services.worker.engines.transformers.sizing import Plan
from services.worker.engines.transformers.step import Listener, Step, StepRow
from services.worker.engines.transformers.stepping import HEADROOM, Stepper

WAIT_S = 20
DEVICE_LOST = "CUDA error: the device is gone"
STOP_ID = 7


def request(*stop_ids: int, error_at: int = -1) -> Any:
    """What the thread reads of a request."""
    constraint = SimpleNamespace(error="") if error_at >= 0 else None
    plan = SimpleNamespace(stop_ids=stop_ids)
    return SimpleNamespace(
        sampler=SimpleNamespace(plan=plan, constraint=constraint, error=None), error_at=error_at, raises={}
    )


class CountingSequence:
    """Its tokens are 100, 101, …; it waits before each one for a permit, if there is a gate."""

    def __init__(self, model: FakeModel, batch_request: Any, token_ids: list[int]) -> None:
        self.model = model
        self.request = batch_request
        self.prompt = token_ids
        self.generated = 0
        self.forgotten = 0

    def next(self) -> tuple[int, None]:
        if self.model.gate is not None:
            assert self.model.gate.acquire(timeout=WAIT_S)
        if self.model.broken:
            raise RuntimeError(DEVICE_LOST)
        self.model.order.append(self.prompt[0])
        self.generated += 1
        if (error := self.request.raises.get(self.generated)) is not None:
            raise error
        if self.generated == self.request.error_at:
            self.request.sampler.constraint.error = "a dead end"
        return 99 + self.generated, None

    def forget(self) -> None:
        self.forgotten += 1


@dataclass
class FakeModel:
    """Makes sequences and collects what is reported of them."""

    gate: threading.Semaphore | None = None
    broken: bool = False
    order: list[int] = field(default_factory=list)
    sequences: list[CountingSequence] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self, batch_request: Any, token_ids: list[int]) -> CountingSequence:
        self.sequences.append(CountingSequence(self, batch_request, token_ids))
        return self.sequences[-1]

    def take(self, step: Step) -> None:
        with self.changed:
            self.rows += step.rows
            self.failed += step.failed
            self.changed.notify_all()

    def tokens(self, key: str) -> list[int]:
        return [row.token_id for row in self.rows if row.key == key]

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)

    def until_ended(self, *keys: str) -> None:
        self.until(lambda: set(keys) <= {row.key for row in self.rows if row.ended})


@contextmanager
def stepping(model: FakeModel, blocks: int = 64, sequences: int = 8) -> Iterator[Stepper]:
    """A running thread, ended afterwards."""
    stepper = Stepper(
        model.begin, Plan(16, blocks, 512, sequences), Listener(model.take, model.ended.set, lambda phase: None)
    )
    stepper.start()
    try:
        yield stepper
    finally:
        if model.gate is not None:
            model.gate.release(1 << 20)
        stepper.close(WAIT_S)
        assert not stepper.alive
        assert model.ended.is_set()


def test_stepper_runs_a_request_to_its_limit_and_reports_the_first_and_last_token() -> None:
    model = FakeModel()
    with stepping(model) as stepper:
        assert stepper.add("a", request(), [1, 2], 3)
        model.until_ended("a")
    assert model.rows == [
        StepRow("a", 100, 0, None, False),
        StepRow("a", 101, None, None, False),
        StepRow("a", 102, None, None, True),
    ]


def test_stepper_ends_a_request_at_a_stop_id() -> None:
    model = FakeModel()
    with stepping(model) as stepper:
        stepper.add("a", request(STOP_ID, 101), [1], 50)
        model.until_ended("a")
    assert model.tokens("a") == [100, 101]


def test_stepper_gives_each_running_request_a_token_in_turn() -> None:
    model = FakeModel(gate=threading.Semaphore(0))
    with stepping(model) as stepper:
        for number in range(3):
            stepper.add(str(number), request(), [number], 10)
        assert model.gate is not None
        model.gate.release(1 << 10)
        model.until_ended("0", "1", "2")
    assert model.order[:9] == [0, 0, 1, 0, 1, 2, 0, 1, 2]


def test_stepper_runs_no_more_requests_than_planned() -> None:
    model = FakeModel()
    running: list[int] = []
    with stepping(model, sequences=2) as stepper:
        for number in range(6):
            stepper.add(str(number), request(), [number], 20)
            running.append(stepper.gauges.running)
        model.until_ended(*map(str, range(6)))
        running.append(stepper.gauges.running)
    assert max(running) <= 2
    assert [model.order.index(number) for number in range(6)] == sorted(model.order.index(n) for n in range(6))
    first_of_third, ends = model.order.index(2), [len(model.order) - 1 - model.order[::-1].index(n) for n in (0, 1)]
    assert first_of_third > min(ends)


def test_stepper_reports_a_failed_constraint_and_forgets_the_request() -> None:
    model = FakeModel()
    with stepping(model) as stepper:
        stepper.add("a", request(error_at=2), [1], 50)
        model.until(lambda: any(row.error for row in model.rows))
        stepper.add("b", request(), [2], 2)
        model.until_ended("b")
    assert [row.error for row in model.rows if row.key == "a"] == ["", "a dead end"]
    assert model.sequences[0].generated == 2


def test_stepper_computes_no_token_of_a_dropped_request() -> None:
    model = FakeModel(gate=threading.Semaphore(0))
    assert model.gate is not None
    with stepping(model) as stepper:
        stepper.add("a", request(), [1], 1000)
        stepper.add("waits", request(), [2], 1000)
        model.gate.release(4)
        model.until(lambda: len(model.rows) >= 3)
        stepper.drop("a")
        stepper.drop("waits")
        stepper.drop("unknown")
        stepper.add("b", request(), [3], 2)
        model.gate.release(1 << 10)
        model.until_ended("b")
    assert not any(row.ended for row in model.rows if row.key != "b")
    assert model.order.count(1) + model.order.count(2) <= 6


def test_stepper_with_a_full_cache_puts_the_newest_request_back_and_computes_it_again() -> None:
    model = FakeModel()
    blocks = (2 * (HEADROOM + 40)) // 16
    limit = 16 * blocks - 40
    with stepping(model, blocks) as stepper:
        for number in range(2):
            stepper.add(str(number), request(), [number] * 40, limit)
        model.until_ended("0", "1")
        assert model.sequences[0].forgotten == 0
        assert model.sequences[1].forgotten >= 1
    for number in range(2):
        assert model.tokens(str(number)) == list(range(100, 100 + limit))
        assert [row.cached_tokens for row in model.rows if row.key == str(number)][:2] == [0, None]


def test_stepper_without_requests_holds_no_sequence_and_reports_no_load() -> None:
    model = FakeModel()
    with stepping(model) as stepper:
        stepper.add("a", request(), [1] * 30, 3)
        model.until_ended("a")
        held = [weakref.ref(sequence) for sequence in model.sequences]
        model.sequences.clear()
        stepper.add("b", request(), [1], 1)
        model.until_ended("b")
        model.sequences.clear()
        for _ in range(1000):
            gc.collect()
            gauges = stepper.gauges
            if held[0]() is None and not gauges.running + gauges.used_blocks + gauges.prefill_tokens:
                break
            threading.Event().wait(0.01)
        else:
            pytest.fail(f"still held: {stepper.gauges}")
        assert stepper.gauges.step_ms > 0


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IndexError("index 542 is out of bounds"), ""),
        (MemoryError(), STEP_FAILED),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), STEP_FAILED),
        (SluiceError(ErrorKind.INTERNAL, "Its own.", code="own"), "own"),
    ],
)
def test_stepper_ends_only_the_request_whose_token_raises(at: int, error: Exception, code: str) -> None:
    model = FakeModel()
    with stepping(model) as stepper:
        bad = request()
        bad.raises[at] = error
        stepper.add("good", request(), [1], 10)
        stepper.add("bad", bad, [2], 10)
        model.until_ended("good")
        model.until(lambda: bool(model.failed))
        assert model.tokens("good") == list(range(100, 110))
        assert model.tokens("bad") == list(range(100, 99 + at))
        ((key, failure),) = model.failed
        assert key == "bad"
        assert isinstance(failure, SluiceError)
        assert (failure.code, failure.retryable) == (code, code == STEP_FAILED)
        assert "542" not in failure.message
        stepper.add("later", request(), [3], 2)
        model.until_ended("later")
        assert stepper.alive


def test_stepper_whose_device_is_lost_reports_every_request_and_accepts_no_more() -> None:
    model = FakeModel(gate=threading.Semaphore(0))
    assert model.gate is not None
    with stepping(model, sequences=1) as stepper:
        stepper.add("a", request(), [1], 10)
        stepper.add("b", request(), [2], 10)
        model.gate.release(2)
        model.until(lambda: len(model.rows) == 2)
        model.broken = True
        model.gate.release(1)
        assert model.ended.wait(WAIT_S)
        assert sorted((key, str(error)) for key, error in model.failed) == [("a", DEVICE_LOST), ("b", DEVICE_LOST)]
        assert str(stepper.fatal_error) == DEVICE_LOST
        assert not stepper.add("c", request(), [3], 1)


def test_stepper_that_is_paused_computes_nothing() -> None:
    model = FakeModel()
    with stepping(model) as stepper:
        with stepper.pause():
            stepper.add("a", request(), [1], 5)
            threading.Event().wait(0.05)
            assert not model.order
        model.until_ended("a")
