"""The mock's scheduler in virtual time: batching, chunks, prefix reuse, preemption, and no block lost."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind
from services.worker.contract.generation import FinishReason, GenerateRequest
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.scheduler import MockScheduler, MockStep
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.text import Answer
from services.worker.engines.mock.timing import FixedTiming, ModelledTiming, decode_ms, prefill_ms
from tests.support.fakes.engines import replay, request
from tests.support.oracles.errors import raises_error

BLOCK = 4


def counting(asked: GenerateRequest, limit: int) -> Answer:
    """An answer anyone can check: 1000, 1001, …, as long as allowed."""
    return Answer(array("I", range(1000, 1000 + limit)), FinishReason.LENGTH)


class Run:
    """A scheduler and everything it did."""

    def __init__(self, total: int = 64, sequences: int = 8, budget: int = 64, waiting: int = 100) -> None:
        self.pool = BlockPool(total)
        self.scheduler = MockScheduler(
            self.pool,
            FixedTiming(1.0, 0.0),
            counting,
            block_size=BLOCK,
            max_sequences=sequences,
            max_batched_tokens=budget,
            max_waiting=waiting,
        )
        self.outputs: dict[str, list[int]] = {}
        self.present: set[int] = set()
        self.arrivals = 0
        self.now = 0.0

    def submit(self, name: str, prompt: list[int], tokens: int, **fields: object) -> Sequence:
        sequence = Sequence(request(name, prompt, **fields), tokens, self.arrivals)
        self.arrivals += 1
        self.scheduler.submit(sequence)
        self.outputs[name] = []
        return sequence

    def step(self) -> MockStep:
        step = self.scheduler.step(self.now)
        self.now += step.duration_s
        for sequence, token_id in step.rows:
            self.outputs[sequence.request.request_id].append(token_id)
        replay(step.events, self.present)
        assert self.present == self.pool.cached_hashes()
        return step

    def finish(self, most: int = 10_000) -> int:
        steps = 0
        while self.scheduler.busy:
            self.step()
            steps += 1
            assert steps < most, "the scheduler makes no progress"
        return steps


def expected(tokens: int) -> list[int]:
    return list(range(1000, 1000 + tokens))


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    run = Run(budget=16)
    run.submit("short", [1, 2, 3], tokens=10)
    run.step()
    run.submit("long", list(range(100, 140)), tokens=2)
    chunks = [run.step().prefill_tokens for _ in range(3)]
    assert chunks == [15, 15, 10]
    assert len(run.outputs["short"]) == 4
    assert run.outputs["long"] == [1000]


@pytest.mark.parametrize(("prompt_tokens", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_cached_tokens_leave_the_last_token_to_compute(prompt_tokens: int, cached: int) -> None:
    run = Run()
    prompt = list(range(prompt_tokens))
    first = run.submit("a", prompt, tokens=1)
    run.finish()
    second = run.submit("b", prompt, tokens=1)
    step = run.step()
    assert first.cached_tokens == 0
    assert second.cached_tokens == cached
    assert step.prefill_tokens == prompt_tokens - cached


def test_a_second_turn_reuses_the_generated_tokens() -> None:
    run = Run()
    prompt = list(range(6))
    run.submit("a", prompt, tokens=10)
    run.finish()
    follow_up = run.submit("b", prompt + expected(10) + [5, 6], tokens=1)
    run.finish()
    assert follow_up.cached_tokens == 12  # of the first answer's last token nothing was computed: 15 tokens, 3 blocks


def test_lower_priority_numbers_run_first() -> None:
    run = Run(sequences=1)
    run.submit("later", [1], tokens=1, priority=5)
    run.submit("normal", [1], tokens=1)
    run.submit("urgent", [1], tokens=1, priority=-1)
    order = []
    while run.scheduler.busy:
        order += [sequence.request.request_id for sequence, _ in run.step().rows]
    assert order == ["urgent", "normal", "later"]


def test_out_of_blocks_the_youngest_is_preempted_and_loses_nothing() -> None:
    run = Run(total=6)
    first = run.submit("a", [1, 2, 3, 4], tokens=16)
    second = run.submit("b", [5, 6, 7, 8], tokens=12)
    preempted = 0
    while run.scheduler.busy:
        preempted += run.step().preempted
    assert preempted >= 1
    assert run.outputs["a"] == expected(16)
    assert run.outputs["b"] == expected(12)
    assert first.cached_tokens == second.cached_tokens == 0
    assert run.pool.used == 0


def test_a_sequence_that_ends_in_the_same_step_cannot_give_way() -> None:
    run = Run(total=3)
    run.submit("low", [1, 2], 3, priority=1)
    run.step()
    # In one step: "low" ends, "b" takes its block, and "c" finds none; "low" would be the first to give way.
    run.submit("b", [11, 12, 13, 14], 4)
    run.submit("c", [21, 22, 23, 24], 4)
    run.finish()
    assert run.outputs == {"low": expected(3), "b": expected(4), "c": expected(4)}
    assert run.pool.used == 0


def test_a_full_queue_refuses_as_overloaded() -> None:
    run = Run(sequences=1, waiting=2)
    for name in "abc":
        run.submit(name, [1], tokens=5)
    with raises_error(kind=ErrorKind.OVERLOADED) as refusal:
        run.submit("d", [1], tokens=5)
    assert refusal.value.retry_after_ms > 0


def test_load_counts_tokens_still_to_compute() -> None:
    run = Run(budget=8)
    run.submit("a", list(range(20)), tokens=1)
    assert run.scheduler.load().prefill_tokens == 20
    run.step()
    assert run.scheduler.load().prefill_tokens == 12
    run.finish()
    assert run.scheduler.load().prefill_tokens == 0


def test_timing_matches_the_known_model() -> None:
    assert prefill_ms(1000) == pytest.approx(4.209989e-7 * 1e6 + 15.18344 + 16.50142)
    assert decode_ms(0.0) == pytest.approx(5.74)
    assert decode_ms(0.5) == pytest.approx(-25.74 / 4 + 54.01 / 2 + 5.74)
    timing = ModelledTiming(speedup=2.0)
    assert timing.step_s(0, 3, 0.0) == pytest.approx(0.00574 / 2)
    assert timing.step_s(100, 3, 0.0) == pytest.approx((prefill_ms(100) + 5.74) / 2000)
    assert timing.step_s(0, 0, 0.5) == 0
    assert FixedTiming(4.0, 10.0, speedup=2.0).step_s(100, 1, 0.3) == pytest.approx(0.0025)


requests = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.integers(1, 24),
    st.integers(-1, 1),
)
actions = st.lists(st.one_of(requests, st.integers(0, 30)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(actions=actions, total=st.integers(11, 24), sequences=st.integers(1, 5), budget=st.integers(1, 24))
def test_whatever_happens_no_block_leaks_and_every_answer_is_whole(
    actions: list[tuple[list[int], int, int] | int], total: int, sequences: int, budget: int
) -> None:
    run = Run(total=total, sequences=sequences, budget=budget)
    alive: dict[str, tuple[Sequence, int]] = {}
    cancelled = Counter[str]()
    for number, action in enumerate(actions):
        if isinstance(action, int):
            if action % 3 == 0 and alive:
                name = sorted(alive)[action % len(alive)]
                run.scheduler.cancel(alive.pop(name)[0])
                cancelled[name] += 1
            else:
                run.step()
        else:
            prompt, tokens, priority = action
            name = f"r{number}"
            alive[name] = (run.submit(name, prompt, tokens, priority=priority), tokens)
    run.finish()
    assert run.pool.used == 0
    assert run.pool.available == total
    for name, (sequence, tokens) in alive.items():
        assert run.outputs[name] == expected(tokens)
        assert sequence.usage().completion_tokens == tokens
    for name in cancelled:
        assert run.outputs[name] == expected(len(run.outputs[name]))
