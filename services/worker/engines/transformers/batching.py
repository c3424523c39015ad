"""Adapts transformers' continuous batching; the only module that accesses its private surface.

`ContinuousBatchingManager` schedules requests, pages the cache and runs steps in its own thread. This module adds
sampling options per request, delivery of tokens once per step instead of once per request, and Sluice's block hashes.
Works with transformers 5.20; `tests/engines` checks the surface used here against the installed version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache_allocators import cache_allocator
from transformers.generation.continuous_batching.requests import RequestStatus

from services.common.base.errors import SluiceError
from services.worker.engines.transformers.batch_request import BatchRequest, Failures
from services.worker.engines.transformers.block_hasher import BlockHasher, forget_hashes, record_changes
from services.worker.engines.transformers.lora import Adapters
from services.worker.engines.transformers.sampler import choose
from services.worker.engines.transformers.sizing import Plan
from services.worker.engines.transformers.step import CacheChanges, Gauges, Listener, Step, StepRow
from services.worker.engines.transformers.step_errors import is_device_lost, row_failed, step_failed

log = logging.getLogger(__name__)

SMOOTHING = 0.1


class Batcher(ContinuousBatchingManager):  # type: ignore[misc]
    """Runs requests in the batching thread.

    Args:
        model: The loaded model, on its device.
        plan: Sizes of the cache and the batches.
        adapters: LoRA adapters of the model.
        prefix_cache: Whether requests share and reuse blocks.
        listener: Callbacks for steps with output and for the thread's exit.

    Attributes:
        gauges: Metrics of the last step.
        batch_requests: Requests in flight by key.
    """

    def __init__(self, model: Any, plan: Plan, adapters: Adapters, prefix_cache: bool, listener: Listener) -> None:
        # Disables every option that moves work out of the step or derives sizes from free memory.
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
        self.batch_requests: dict[str, BatchRequest] = {}
        self._plan = plan
        self._adapters = adapters
        self._listener = listener
        self._cache_changes = CacheChanges()
        self._block_hasher = BlockHasher()
        self._failures = Failures()
        self._step_started_at = 0.0
        self._scheduled: list[Any] = []  # the library's requests of the current step

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests can share cached prefixes; available after `prepare`."""
        return bool(self.batch_processor.cache.use_prefix_sharing)

    @property
    def cache_tokens(self) -> int:
        """Capacity of the cache in tokens, which limits the length of a sequence."""
        return int(self.batch_processor.cache.num_blocks) * self._plan.block_size

    def prepare(self) -> None:
        """Allocates the cache, which is slow; raises MemoryError or RuntimeError when memory is insufficient."""
        self.output_router = self._failures
        self.warmup()
        self._patch_processor(self.batch_processor)

    def start(self) -> None:
        """Starts the batching thread as a daemon thread."""
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(target=self._run, name="transformers-steps", daemon=True)
        self._generation_thread.start()

    def add(self, key: str, batch_request: BatchRequest, token_ids: list[int], limit: int) -> bool:
        """Queues a request; returns False when the thread has stopped."""
        self.batch_requests[key] = batch_request
        stop_ids = list(batch_request.sampler.plan.stop_ids) or [-1]
        accepted = self.add_request(token_ids, request_id=key, max_new_tokens=limit, eos_token_id=stop_ids)
        if accepted is None:
            del self.batch_requests[key]
        return accepted is not None

    def drop(self, key: str) -> None:
        """Cancels a request; its blocks are freed before the next step."""
        self.batch_requests.pop(key, None)
        self.cancel_request(key)

    def release(self, key: str) -> None:
        """Forgets a request whose last token was reported."""
        self.batch_requests.pop(key, None)

    def close(self, limit_s: float) -> None:
        """Ends the batching thread and waits for it, at most `limit_s` seconds."""
        self.stop(True, limit_s, False, True)

    def forget_prefixes(self) -> None:
        """Clears the prefix cache between two steps; blocks in use keep their contents but cannot be reused."""
        with self.pause():
            self.batch_processor.cache.evict_cached_blocks()
            for allocator in self.batch_processor.cache.cache_allocators.values():
                forget_hashes(allocator.ledger, self._cache_changes)
            self._update_gauges(stepped=False)
            self._publish()

    @property
    def alive(self) -> bool:
        """Whether the batching thread is running."""
        return bool(self.is_running())

    @property
    def fatal_error(self) -> BaseException | None:
        """The failure that ended the thread; None if it has not failed."""
        error: BaseException | None = self.background_thread_status.fatal_error
        return error

    def _create_batch_processor(self) -> Any:
        # The library would create or reset the processor when its loop starts; keep the prepared one.
        return self.batch_processor if self.batch_processor is not None else super()._create_batch_processor()

    def _run(self) -> None:
        cache_allocator.compute_block_hash = self._block_hasher
        try:
            self._run_generation_loop()
            self._publish()
        finally:
            self._listener.on_end()

    def _patch_processor(self, processor: Any) -> None:
        cache = processor.cache
        processor.model_runner._sample = self._sample
        prepare, update = processor.prepare_next_batch, processor.update_batch
        search, mark = cache.search_prefix_match, cache.mark_complete_blocks

        def prepare_next_batch() -> bool:
            self._step_started_at = time.perf_counter()
            self._scheduled = []
            ready: bool = prepare()
            if ready:
                self._scheduled = list(processor.inputs_and_outputs.requests_in_batch)
                self._adapters.select(
                    [
                        (self._adapter_of(scheduled.state.request_id), scheduled.query_length)
                        for scheduled in self._scheduled
                    ]
                )
            else:
                self._update_gauges(stepped=False)
                self._publish()
            return ready

        def update_batch() -> None:
            update()
            rows = [
                row for item in self._scheduled if item.has_new_token and (row := self._row(item.state)) is not None
            ]
            self._update_gauges(stepped=True)
            self._publish(rows)

        def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
            batch_request = self.batch_requests.get(request_id)
            if batch_request is None:
                return 0
            self._block_hasher.seed = batch_request.seed
            cached_tokens = batch_request.sampler.attempt(partial(search, request_id, prompt_ids), 0)
            if not batch_request.begun:
                batch_request.cached_tokens = cached_tokens
            return cached_tokens

        def mark_complete_blocks(state: Any, complete_blocks: dict[str, int]) -> None:
            # A dropped request has no seed any more, so its blocks cannot be hashed.
            if (batch_request := self.batch_requests.get(state.request_id)) is not None:
                self._block_hasher.seed = batch_request.seed
                batch_request.sampler.attempt(partial(mark, state, complete_blocks), None)

        def by_priority() -> list[Any]:
            return sorted(candidates(), key=self._priority_of)

        candidates, processor.scheduler._get_waiting_candidates = (
            processor.scheduler._get_waiting_candidates,
            by_priority,
        )
        processor.prepare_next_batch, processor.update_batch = prepare_next_batch, update_batch
        cache.search_prefix_match, cache.mark_complete_blocks = search_prefix_match, mark_complete_blocks
        for allocator in cache.cache_allocators.values():
            record_changes(allocator.ledger, self._cache_changes)

    def _adapter_of(self, key: str) -> str:
        batch_request = self.batch_requests.get(key)
        return batch_request.adapter if batch_request is not None else ""

    def _priority_of(self, state: Any) -> int:
        batch_request = self.batch_requests.get(state.request_id)
        return batch_request.priority if batch_request is not None else 0

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Replaces the library's sampling; uses each request's own options. scores: [1, requests, vocabulary]."""
        batch = self.batch_processor.inputs_and_outputs.requests_in_batch
        with_token = [scheduled for scheduled in batch if scheduled.has_new_token]
        rows = [(row, self.batch_requests.get(item.state.request_id)) for row, item in enumerate(with_token)]
        # An aborted request may still be in the batch; skip its row.
        active = [(row, batch_request) for row, batch_request in rows if batch_request is not None]
        if not active:
            return
        indices = [row for row, _ in active]
        tokens, ids, logprobs = choose(scores[0, indices], [batch_request.sampler for _, batch_request in active])
        output_ids[0, indices] = tokens.to(output_ids.dtype)
        for index, (_, batch_request) in enumerate(active):
            batch_request.token_id = ids[index]
            batch_request.logprobs = None if logprobs is None else logprobs[index]

    def _row(self, state: Any) -> StepRow | None:
        """Returns the output of a request in this step; None for a dropped request."""
        key = state.request_id
        batch_request = self.batch_requests.get(key)
        if batch_request is None:
            self.cancel_request(key)  # the first cancellation may have preceded the request
            return None
        if batch_request.sampler.error is not None:
            self._fail_row(key, batch_request.sampler.error)
            return None
        cached_tokens = None if batch_request.begun else batch_request.cached_tokens
        batch_request.begun = True
        ended = state.status >= RequestStatus.FINISHED
        constraint = batch_request.sampler.constraint
        return StepRow(
            key,
            batch_request.token_id,
            cached_tokens,
            batch_request.logprobs,
            ended,
            constraint.error if constraint is not None else "",
        )

    def _fail_row(self, key: str, error: Exception) -> None:
        """Ends one request; its blocks are freed before the next step."""
        log.error("a request failed in a step", extra={"key": key}, exc_info=error)
        self._failures.failed.append((key, row_failed(error)))
        self.drop(key)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        """As the library's; a step that raises ends its requests, and the thread only if the device is lost."""
        try:
            return bool(super()._generation_loop_body(batch_processor, bootstrapping))
        except Exception as error:
            if is_device_lost(error) or not (self._scheduled or batch_processor.has_pending_requests()):
                raise
            log.exception("a step failed", extra={"requests": len(self._scheduled)})
            failure = step_failed(error)
        # After the handler, whose traceback holds the tensors of the step.
        self._fail_step(batch_processor, failure)
        return True

    def _fail_step(self, processor: Any, error: SluiceError) -> None:
        """Ends the requests of the current step, or all requests if it failed while they were being selected."""
        if self._scheduled:
            for item in self._scheduled:
                self._failures.failed.append((item.state.request_id, error))
                processor.scheduler.finish_request(item.state.request_id)
        else:
            processor.fail_all_requests(error)
        self._scheduled = []
        processor.scheduler.block_new_requests = False
        for key, _ in self._failures.failed:
            self.batch_requests.pop(key, None)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self._update_gauges(stepped=False)
        self._publish()

    def _publish(self, rows: Sequence[StepRow] = ()) -> None:
        failed, self._failures.failed = self._failures.failed, []
        step = Step(list(rows), self._cache_changes.take(), failed)
        if step:
            self._listener.on_step(step)

    def _update_gauges(self, stepped: bool) -> None:
        scheduler, cache = self.batch_processor.scheduler, self.batch_processor.cache
        free = cached = hashed = 0
        for allocator in cache.cache_allocators.values():
            free += cache.pool.count_free_blocks(allocator.index)
            cached += len(allocator.ledger.cached_blocks)
            hashed += len(allocator.ledger.block_to_hash)
        free += cache.num_blocks * len(cache.pool.free_sectors) // cache.num_sectors
        active, waiting = scheduler.active_requests.values(), scheduler.waiting_requests.values()
        step_ms = self.gauges.step_ms
        if stepped:
            last_ms = (time.perf_counter() - self._step_started_at) * 1e3
            step_ms = step_ms + SMOOTHING * (last_ms - step_ms) if step_ms else last_ms
        self.gauges = Gauges(
            running=len(active),
            used_blocks=max(0, cache.num_blocks - free - cached),
            cached_blocks=hashed,
            prefill_tokens=sum(len(state.remaining_prefill_tokens) for state in (*active, *waiting)),
            step_ms=step_ms,
        )
