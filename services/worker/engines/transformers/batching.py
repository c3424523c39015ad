"""The only module that touches the library's continuous batching, and the parts of it that are used.

`ContinuousBatchingManager` schedules, pages and steps in a thread of its own. It is given three things it lacks: every
request's own sampling, tokens handed over once a step instead of once a request, and block hashes others understand.
Works with transformers 5.20; `tests/engines` holds the surface used here against the installed version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache_allocators import cache_allocator
from transformers.generation.continuous_batching.requests import RequestStatus

from services.worker.engines.transformers.batch_request import BatchRequest, Failures
from services.worker.engines.transformers.block_names import BlockNames, forget_names, watched
from services.worker.engines.transformers.lora import Adapters
from services.worker.engines.transformers.sampler import choose
from services.worker.engines.transformers.sizing import Plan
from services.worker.engines.transformers.step import CacheChanges, Gauges, Listener, Row, Step

SMOOTHING = 0.1


class Batcher(ContinuousBatchingManager):  # type: ignore[misc]
    """Steps requests in a thread.

    Args:
        model: loaded, on its device.
        plan: sizes.
        adapters: LoRA adapters of the model.
        prefix_cache: whether blocks are shared and kept.
        listener: hears of every step that has something to say, and of the thread's end.

    Attributes:
        gauges: of the last step.
    """

    def __init__(self, model: Any, plan: Plan, adapters: Adapters, prefix_cache: bool, listener: Listener) -> None:
        # Everything that would move work away from the step, or guess sizes from free memory, is off.
        config = ContinuousBatchingConfig(
            page_size=plan.block_size,
            num_blocks=plan.total_blocks,
            max_batch_tokens=plan.max_batched_tokens,
            max_requests_per_batch=min(plan.max_sequences, plan.max_batched_tokens),
            max_blocks_per_request=0,
            max_memory_percent=0.9,
            allow_block_sharing=prefix_cache,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        super().__init__(model, GenerationConfig(do_sample=False, eos_token_id=-1), config)
        self.gauges = Gauges()
        self.seats: dict[str, BatchRequest] = {}
        self._plan = plan
        self._adapters = adapters
        self._listener = listener
        self._news = CacheChanges()
        self._names = BlockNames()
        self._failures = Failures()
        self._step_began = 0.0

    @property
    def shares_prefixes(self) -> bool:
        """The model's cache can be reused between requests; known after `prepare`."""
        return bool(self.batch_processor.cache.use_prefix_sharing)

    @property
    def tokens_of_cache(self) -> int:
        """The longest sequence that fits into the cache by itself."""
        return int(self.batch_processor.cache.num_blocks) * self._plan.block_size

    def prepare(self) -> None:
        """Allocates the cache; slow. Raises MemoryError or RuntimeError when there is too little memory."""
        self.output_router = self._failures
        self.warmup()
        self._take_over(self.batch_processor)

    def start(self) -> None:
        """Starts the thread; it never keeps the process alive."""
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(target=self._run, name="transformers-steps", daemon=True)
        self._generation_thread.start()

    def add(self, key: str, batch_request: BatchRequest, token_ids: list[int], limit: int) -> bool:
        """Queues a request; False when the thread takes none any more."""
        self.seats[key] = batch_request
        stop_ids = list(batch_request.sampler.plan.stop_ids) or [-1]
        taken = self.add_request(token_ids, request_id=key, max_new_tokens=limit, eos_token_id=stop_ids)
        if taken is None:
            del self.seats[key]
        return taken is not None

    def drop(self, key: str) -> None:
        """Ends a request; its blocks are free when the next step begins."""
        self.seats.pop(key, None)
        self.cancel_request(key)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache between two steps; blocks in use lose nothing but their name."""
        with self.pause():
            self.batch_processor.cache.evict_cached_blocks()
            for allocator in self.batch_processor.cache.cache_allocators.values():
                forget_names(allocator.ledger, self._news)
            self._measure(stepped=False)
            self._publish()

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return bool(self.is_running())

    def _create_batch_processor(self) -> Any:
        # The library makes a new one, or resets the old one, when its loop starts; ours is ready by then.
        return self.batch_processor if self.batch_processor is not None else super()._create_batch_processor()

    def _run(self) -> None:
        cache_allocator.compute_block_hash = self._names
        try:
            self._run_generation_loop()
            self._publish()
        finally:
            self._listener.on_end()

    def _take_over(self, processor: Any) -> None:
        cache = processor.cache
        processor.model_runner._sample = self._sample
        prepare, update = processor.prepare_next_batch, processor.update_batch
        search, mark = cache.search_prefix_match, cache.mark_complete_blocks

        def prepare_next_batch() -> bool:
            self._step_began = time.perf_counter()
            ready: bool = prepare()
            if ready:
                self._adapters.select(
                    [
                        (self._adapter_of(one.state.request_id), one.query_length)
                        for one in processor.inputs_and_outputs.requests_in_batch
                    ]
                )
            else:
                self._measure(stepped=False)
                self._publish()
            return ready

        def update_batch() -> None:
            scheduled = list(processor.inputs_and_outputs.requests_in_batch)
            update()
            rows = [row for one in scheduled if one.has_new_token and (row := self._row(one.state)) is not None]
            self._measure(stepped=True)
            self._publish(rows)

        def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
            batch_request = self.seats.get(request_id)
            if batch_request is None:
                return 0
            self._names.seed = batch_request.seed
            found: int = search(request_id, prompt_ids)
            if not batch_request.began:
                batch_request.cached = found
            return found

        def mark_complete_blocks(state: Any, complete_blocks: dict[str, int]) -> None:
            # Without a seat the request is about to be dropped, and the seed of its blocks is no longer known.
            if (batch_request := self.seats.get(state.request_id)) is not None:
                self._names.seed = batch_request.seed
                mark(state, complete_blocks)

        def by_priority() -> list[Any]:
            return sorted(line(), key=self._priority_of)

        line, processor.scheduler._get_waiting_candidates = processor.scheduler._get_waiting_candidates, by_priority
        processor.prepare_next_batch, processor.update_batch = prepare_next_batch, update_batch
        cache.search_prefix_match, cache.mark_complete_blocks = search_prefix_match, mark_complete_blocks
        for allocator in cache.cache_allocators.values():
            watched(allocator.ledger, self._news)

    def _adapter_of(self, key: str) -> str:
        batch_request = self.seats.get(key)
        return batch_request.adapter if batch_request is not None else ""

    def _priority_of(self, state: Any) -> int:
        batch_request = self.seats.get(state.request_id)
        return batch_request.priority if batch_request is not None else 0

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """In place of the library's: each request by its own options. scores [1, requests, vocabulary]."""
        batch = self.batch_processor.inputs_and_outputs.requests_in_batch
        # An aborted request may still be in the batch: its token is chosen by nobody and read by nobody.
        rows = [(place, self.seats.get(one.state.request_id)) for place, one in enumerate(_with_token(batch))]
        seated = [(place, batch_request) for place, batch_request in rows if batch_request is not None]
        if not seated:
            return
        places = [place for place, _ in seated]
        tokens, ids, logprobs = choose(scores[0, places], [batch_request.sampler for _, batch_request in seated])
        output_ids[0, places] = tokens.to(output_ids.dtype)
        for index, (_, batch_request) in enumerate(seated):
            batch_request.token_id = ids[index]
            batch_request.logprobs = None if logprobs is None else logprobs[index]

    def _row(self, state: Any) -> Row | None:
        """What a request got in the step; None when nobody waits for it."""
        key = state.request_id
        batch_request = self.seats.get(key)
        if batch_request is None:
            self.cancel_request(key)  # its first cancellation may have overtaken the request itself
            return None
        cached = None if batch_request.began else batch_request.cached
        batch_request.began = True
        ended = state.status >= RequestStatus.FINISHED
        constraint = batch_request.sampler.constraint
        return Row(
            key,
            batch_request.token_id,
            cached,
            batch_request.logprobs,
            ended,
            constraint.error if constraint is not None else "",
        )

    def _publish(self, rows: Sequence[Row] = ()) -> None:
        failed, self._failures.failed = self._failures.failed, []
        step = Step(list(rows), self._news.take(), failed)
        if step:
            self._listener.on_step(step)

    def _measure(self, stepped: bool) -> None:
        scheduler, cache = self.batch_processor.scheduler, self.batch_processor.cache
        free = cached = named = 0
        for allocator in cache.cache_allocators.values():
            free += cache.pool.count_free_blocks(allocator.index)
            cached += len(allocator.ledger.cached_blocks)
            named += len(allocator.ledger.block_to_hash)
        free += cache.num_blocks * len(cache.pool.free_sectors) // cache.num_sectors
        active, waiting = scheduler.active_requests.values(), scheduler.waiting_requests.values()
        took_ms = (time.perf_counter() - self._step_began) * 1e3
        smooth = self.gauges.step_ms
        self.gauges = Gauges(
            running=len(active),
            used_blocks=max(0, cache.num_blocks - free - cached),
            cached_blocks=named,
            prefill_tokens=sum(len(one.remaining_prefill_tokens) for states in (active, waiting) for one in states),
            step_ms=smooth + SMOOTHING * (took_ms - smooth) if stepped and smooth else took_ms if stepped else smooth,
        )


def _with_token(batch: Sequence[Any]) -> list[Any]:
    return [one for one in batch if one.has_new_token]
