"""Continuous batching over a paged cache, in virtual time: no clock, no tasks, one call per engine step."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from services.common.errors import overloaded
from services.worker.contract.cache_events import KvEvent
from services.worker.contract.engine import Load
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.sequence import Sequence, State
from services.worker.engines.mock.text import AnswerFor
from services.worker.engines.mock.timing import StepTiming

STEP_SMOOTHING = 0.1


@dataclass(slots=True)
class Step:
    """What one engine step did.

    Attributes:
        duration_s: seconds a real engine would have taken.
        rows: each sequence that got a token, with that token.
        ended: the sequences whose last token is among them.
        events: cache changes, in order.
        prefill_tokens: prompt tokens computed.
        preempted: sequences that lost their blocks and wait again.
    """

    duration_s: float = 0.0
    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    prefill_tokens: int = 0
    preempted: int = 0


class Scheduler:
    """First come, first served within a priority; decoding before prefilling; preemption by recomputing."""

    def __init__(
        self,
        pool: BlockPool,
        timing: StepTiming,
        answer_for: AnswerFor,
        *,
        block_size: int,
        max_sequences: int,
        max_batched_tokens: int,
        max_waiting: int,
    ) -> None:
        self.pool = pool
        self._timing = timing
        self._answer_for = answer_for
        self._block_size = block_size
        self._max_sequences = min(max_sequences, max_batched_tokens)
        self._max_batched_tokens = max_batched_tokens
        self._max_waiting = max_waiting
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._step_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._decoding or self._prefilling or self._waiting)

    def load(self) -> Load:
        """Requests and blocks now."""
        waiting, prefilling = tuple(self._waiting), tuple(self._prefilling)
        return Load(
            running_requests=len(self._decoding) + len(prefilling),
            waiting_requests=len(waiting),
            used_blocks=self.pool.used,
            cached_blocks=self.pool.cached,
            prefill_tokens=sum(sequence.known - sequence.computed for sequence in (*waiting, *prefilling)),
            step_ms=self._step_s * 1e3,
        )

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence; SluiceError(OVERLOADED) when as many wait as may."""
        if len(self._waiting) >= self._max_waiting + self._free_places():
            raise overloaded(f"The engine's queue is full: {len(self._waiting)} requests wait already.")
        insort(self._waiting, sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at once and gives its blocks back; an ended one is ignored."""
        if sequence.state is State.WAITING:
            del self._waiting[bisect_left(self._waiting, sequence)]
        elif sequence.state is State.PREFILLING:
            self._prefilling.remove(sequence)
        elif sequence.state is State.DECODING:
            self._decoding.remove(sequence)
        self._end(sequence)

    def step(self, now: float) -> Step:
        """Runs one step that begins at `now`, in seconds of any clock; what it returns is true at its end."""
        step = Step()
        decoding = len(self._decoding)
        cache_use = self.pool.used / self.pool.total
        self._decode(step)
        budget = self._max_batched_tokens - decoding
        budget = self._prefill_running(step, budget)
        if not step.preempted:
            self._admit(step, budget, now)
        step.duration_s = self._timing.step_s(step.prefill_tokens, decoding, cache_use)
        step.events = self.pool.take_events()
        self._step_s += STEP_SMOOTHING * (step.duration_s - self._step_s)
        return step

    def _free_places(self) -> int:
        return self._max_sequences - len(self._decoding) - len(self._prefilling)

    def _decode(self, step: Step) -> None:
        """One token for every decoding sequence; this loop is the engine's hot path."""
        rows = step.rows
        for sequence in tuple(self._decoding):
            if sequence.quiet:
                sequence.quiet -= 1
            elif not self._advance(sequence, step):
                continue
            known = sequence.known
            rows.append((sequence, sequence.tokens[known]))
            sequence.known = known + 1
        if step.ended:
            self._decoding = [sequence for sequence in self._decoding if sequence.state is State.DECODING]

    def _advance(self, sequence: Sequence, step: Step) -> bool:
        """The steps that are not quiet: takes a block, stores a full one, ends. False: it was preempted instead."""
        if sequence.state is not State.DECODING:
            return False
        size = self._block_size
        position = sequence.known - 1
        if position // size == len(sequence.blocks):
            while not self.pool.available:
                victim = self._youngest()
                self._preempt(victim, step)
                if victim is sequence:
                    return False
            sequence.blocks.append(self.pool.allocate())
        full, rest = divmod(sequence.known, size)
        if rest == 0:
            self.pool.store(sequence.blocks[full - 1], sequence.hash_upto(full, size)[full - 1])
        remaining = sequence.end - sequence.known - 1
        if remaining == 0:
            self._end(sequence)
            step.ended.append(sequence)
            return True
        sequence.quiet = min(size - 1 - rest if rest else 0, remaining - 1)
        return True

    def _youngest(self) -> Sequence:
        """Who gives way first; one that ended in this step is still in the batch and has nothing left to give."""
        running = (one for one in (*self._decoding, *self._prefilling) if one.state is not State.ENDED)
        return max(running, key=lambda one: one.order)

    def _prefill_running(self, step: Step, budget: int) -> int:
        for sequence in tuple(self._prefilling):
            if budget == 0:
                break
            if sequence.state is State.PREFILLING:
                budget -= self._compute_chunk(sequence, budget, step)
        return budget

    def _admit(self, step: Step, budget: int, now: float) -> None:
        """Moves waiting sequences into the batch while places, tokens and blocks last, strictly in order."""
        places = self._free_places()
        while self._waiting and budget and places and self._place(self._waiting[0], now):
            sequence = self._waiting.pop(0)
            places -= 1
            if sequence.arrived:
                self._resume(sequence)
                continue
            sequence.state = State.PREFILLING
            self._prefilling.append(sequence)
            budget -= self._compute_chunk(sequence, budget, step)

    def _resume(self, sequence: Sequence) -> None:
        """Its cache is in the blocks that were just placed: it decodes from the next step on."""
        sequence.arrived = False
        sequence.computed = sequence.known - 1
        sequence.state = State.DECODING
        self._decoding.append(sequence)

    def _place(self, sequence: Sequence, now: float) -> bool:
        """Reserves blocks for everything known of a sequence; at least its last token is always computed anew."""
        if sequence.answer is None:
            sequence.prepare(self._answer_for(sequence.request, sequence.limit))
        size = self._block_size
        reusable = (sequence.known - 1) // size
        prefix = self.pool.find_prefix(sequence.hash_upto(reusable, size), reusable)
        fresh = -(-sequence.known // size) - len(prefix)
        if not self.pool.can_hold(prefix, fresh):
            return False
        self.pool.hold(prefix)
        sequence.blocks = [*prefix, *(self.pool.allocate() for _ in range(fresh))]
        sequence.computed = len(prefix) * size
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = sequence.computed
        return True

    def _compute_chunk(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Computes up to `budget` tokens of a prompt; returns how many. The last chunk yields a token."""
        size = self._block_size
        chunk = min(budget, sequence.known - sequence.computed)
        full_before = sequence.computed // size
        sequence.computed += chunk
        full = sequence.computed // size
        hashes = sequence.hash_upto(full, size)
        for index in range(full_before, full):
            self.pool.store(sequence.blocks[index], hashes[index])
        step.prefill_tokens += chunk
        if sequence.computed == sequence.known:
            self._prefilling.remove(sequence)
            self._start_decoding(sequence, step)
        return chunk

    def _start_decoding(self, sequence: Sequence, step: Step) -> None:
        step.rows.append((sequence, sequence.tokens[sequence.known]))
        sequence.known += 1
        sequence.quiet = 0
        if sequence.known == sequence.end:
            self._end(sequence)
            step.ended.append(sequence)
        else:
            sequence.state = State.DECODING
            self._decoding.append(sequence)

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Takes everything from a sequence but what it has said; it is computed again when there is room."""
        (self._decoding if sequence.state is State.DECODING else self._prefilling).remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        insort(self._waiting, sequence)
        step.preempted += 1

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is not State.ENDED:
            self._release(sequence)
            sequence.state = State.ENDED

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.quiet = 0
