"""Continuous batching with a paged cache in virtual time: no clock and no tasks, one call per engine step."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from services.common.base.errors import overloaded
from services.common.base.shared_steps import shared_step
from services.worker.contract.cache_events import KvEvent
from services.worker.contract.engine import Load
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.sequence import Sequence, SequenceState
from services.worker.engines.mock.text import AnswerFor
from services.worker.engines.mock.timing import StepTiming

STEP_SMOOTHING = 0.1


@dataclass(slots=True)
class MockStep:
    """Result of one engine step.

    Attributes:
        duration_s: Simulated duration in seconds.
        rows: Sequences that generated a token, with that token.
        ended: Sequences that generated their last token.
        events: Cache events, in order.
        prefill_tokens: Number of prompt tokens computed.
        encoder_tokens: Work of encoding media items, in prompt tokens.
        failed: Sequences that raised, with the exception; they have no blocks any more.
        preempted: Number of sequences that were preempted.
    """

    duration_s: float = 0.0
    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    prefill_tokens: int = 0
    encoder_tokens: int = 0
    preempted: int = 0
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)


class MockScheduler:
    """Schedules by priority, then by arrival; decodes before prefilling, and preempts by recomputation."""

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
        """Whether there is work for a step."""
        return bool(self._decoding or self._prefilling or self._waiting)

    def load(self) -> Load:
        """Returns the current load."""
        waiting, prefilling = tuple(self._waiting), tuple(self._prefilling)
        return Load(
            running_requests=len(self._decoding) + len(prefilling),
            waiting_requests=len(waiting),
            used_blocks=self.pool.used,
            cached_blocks=self.pool.cached,
            prefill_tokens=sum(sequence.token_count - sequence.computed_tokens for sequence in (*waiting, *prefilling)),
            step_ms=self._step_s * 1e3,
        )

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence; raises SluiceError(OVERLOADED) when the queue is full."""
        if len(self._waiting) >= self._max_waiting + self._free_slots():
            raise overloaded(f"The engine's queue is full ({len(self._waiting)} requests waiting); try again later.")
        insort(self._waiting, sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence and releases its blocks; ignores an ended sequence."""
        if sequence.state is SequenceState.WAITING:
            del self._waiting[bisect_left(self._waiting, sequence)]
        elif sequence.state is SequenceState.PREFILLING:
            self._prefilling.remove(sequence)
        elif sequence.state is SequenceState.DECODING:
            self._decoding.remove(sequence)
        self._end(sequence)

    @shared_step("mock.step")
    def step(self, now: float) -> MockStep:
        """Runs one step that starts at `now` (seconds of any clock); the result applies to its end."""
        step, pool = MockStep(), self.pool
        decoding, cache_use = len(self._decoding), pool.used / pool.total
        if decoding:
            self._decode(step)
        if self._prefilling or self._waiting:
            budget = self._prefill_running(step, self._max_batched_tokens - decoding)
            if not step.preempted:
                self._admit(step, budget, now)
        step.duration_s = self._timing.step_s(step.prefill_tokens + step.encoder_tokens, decoding, cache_use)
        if pool.events:
            step.events = pool.take_events()
        self._step_s += STEP_SMOOTHING * (step.duration_s - self._step_s)
        return step

    def _free_slots(self) -> int:
        return self._max_sequences - len(self._decoding) - len(self._prefilling)

    def _decode(self, step: MockStep) -> None:
        """Generates a token for every decoding sequence; the engine's hot path."""
        rows = step.rows
        for sequence in tuple(self._decoding):
            try:
                if sequence.quiet_steps:
                    sequence.quiet_steps -= 1
                elif not self._advance(sequence, step):
                    continue
                token_count = sequence.token_count
                rows.append((sequence, sequence.tokens[token_count]))
                sequence.token_count = token_count + 1
            except Exception as error:
                self._fail(sequence, step, error)
        if step.ended:
            self._decoding = [sequence for sequence in self._decoding if sequence.state is SequenceState.DECODING]

    def _advance(self, sequence: Sequence, step: MockStep) -> bool:
        """Allocates or stores a block, or ends the sequence, if due; returns False when it was preempted instead."""
        if sequence.state is not SequenceState.DECODING:
            return False
        size = self._block_size
        position = sequence.token_count - 1
        if position // size == len(sequence.blocks):
            while not self.pool.available:
                victim = self._last_in_order()
                self._preempt(victim, step)
                if victim is sequence:
                    return False
            sequence.blocks += self.pool.allocate(1)
        full_blocks, remainder = divmod(sequence.token_count, size)
        if remainder == 0:
            last = slice(full_blocks - 1, full_blocks)
            self.pool.store(sequence.blocks[last], sequence.hashes_upto(full_blocks, size)[last])
        remaining = sequence.total_tokens - sequence.token_count - 1
        if remaining == 0:
            self._end(sequence)
            step.ended.append(sequence)
            return True
        sequence.quiet_steps = min(size - 1 - remainder if remainder else 0, remaining - 1)
        return True

    def _last_in_order(self) -> Sequence:
        """Returns the sequence to preempt first; those that ended in this step are still listed but have no blocks."""
        candidates = (*self._decoding, *self._prefilling)
        return max((item for item in candidates if item.state is not SequenceState.ENDED), key=lambda item: item.order)

    def _prefill_running(self, step: MockStep, budget: int) -> int:
        for sequence in tuple(self._prefilling):
            if budget == 0:
                break
            if sequence.state is SequenceState.PREFILLING:
                budget -= self._compute(sequence, budget, step)
        return budget

    def _admit(self, step: MockStep, budget: int, now: float) -> None:
        """Admits waiting sequences, strictly in order, while slots, tokens and blocks are available."""
        slots = self._free_slots()
        while self._waiting and budget and slots:
            sequence = self._waiting[0]
            try:
                if not self._reserve_blocks(sequence, now):
                    return
            except Exception as error:
                self._fail(sequence, step, error)
                continue
            del self._waiting[0]
            slots -= 1
            if sequence.is_prefilled:
                self._start_prefilled(sequence)
                continue
            sequence.state = SequenceState.PREFILLING
            self._prefilling.append(sequence)
            budget -= self._compute(sequence, budget, step)

    def _start_prefilled(self, sequence: Sequence) -> None:
        """Starts decoding a sequence whose cache was transferred into its blocks."""
        sequence.is_prefilled = False
        sequence.computed_tokens = sequence.token_count - 1
        sequence.state = SequenceState.DECODING
        self._decoding.append(sequence)

    def _reserve_blocks(self, sequence: Sequence, now: float) -> bool:
        """Reserves blocks for all tokens of a sequence, if possible; the last token is never reused from the cache."""
        if sequence.answer is None:
            sequence.prepare(self._answer_for(sequence.request, sequence.limit))
        size = self._block_size
        reusable = (sequence.token_count - 1) // size
        prefix = self.pool.find_prefix(sequence.hashes_upto(reusable, size), reusable)
        fresh = -(-sequence.token_count // size) - len(prefix)
        if not self.pool.can_hold(prefix, fresh):
            return False
        self.pool.hold(prefix)
        sequence.blocks = prefix + self.pool.allocate(fresh)
        sequence.computed_tokens = len(prefix) * size
        if sequence.media:
            sequence.begin_encoding()
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = sequence.computed_tokens
        return True

    def _compute(self, sequence: Sequence, budget: int, step: MockStep) -> int:
        """As `_compute_chunk`; an exception ends only this sequence."""
        try:
            return self._compute_chunk(sequence, budget, step)
        except Exception as error:
            self._fail(sequence, step, error)
            return 0

    def _compute_chunk(self, sequence: Sequence, budget: int, step: MockStep) -> int:
        """Computes up to `budget` tokens of a prompt and returns their number; the last chunk generates a token."""
        size = self._block_size
        chunk = min(budget, sequence.token_count - sequence.computed_tokens)
        full_blocks_before = sequence.computed_tokens // size
        sequence.computed_tokens += chunk
        full_blocks = sequence.computed_tokens // size
        new = slice(full_blocks_before, full_blocks)
        self.pool.store(sequence.blocks[new], sequence.hashes_upto(full_blocks, size)[new])
        step.prefill_tokens += chunk
        if sequence.unencoded:
            step.encoder_tokens += sequence.encode_upto(sequence.computed_tokens)
        if sequence.computed_tokens == sequence.token_count:
            self._prefilling.remove(sequence)
            self._start_decoding(sequence, step)
        return chunk

    def _start_decoding(self, sequence: Sequence, step: MockStep) -> None:
        step.rows.append((sequence, sequence.tokens[sequence.token_count]))
        sequence.token_count += 1
        sequence.quiet_steps = 0
        if sequence.token_count == sequence.total_tokens:
            self._end(sequence)
            step.ended.append(sequence)
        else:
            sequence.state = SequenceState.DECODING
            self._decoding.append(sequence)

    def _preempt(self, sequence: Sequence, step: MockStep) -> None:
        """Releases a sequence's blocks and queues it again; its tokens are recomputed later."""
        (self._decoding if sequence.state is SequenceState.DECODING else self._prefilling).remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence)
        step.preempted += 1

    def _fail(self, sequence: Sequence, step: MockStep, error: Exception) -> None:
        """Ends a sequence that raised, in whatever state it is."""
        for queue in (self._waiting, self._prefilling, self._decoding):
            if sequence in queue:
                queue.remove(sequence)
        self._end(sequence)
        step.failed.append((sequence, error))

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.ENDED:
            self._release(sequence)
            sequence.state = SequenceState.ENDED

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed_tokens = 0
        sequence.quiet_steps = 0
