"""What the router's own code costs, without a process in between: matching, applying, hashing, memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

from services.common.base.packing import pack_u32, pack_u64
from services.common.types.hashing import block_hashes
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.kv_index.index import BlockIndex
from services.router.state.workers.worker import WorkerRank

BLOCK_SIZE = 16
PLENTY = 1 << 24
ROUNDS = 7  # the best counts: this machine may be busy with something else


def seconds_each(step: Callable[[], object], times: int) -> float:
    """CPU seconds one call takes, in the best of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(times):
            step()
        best = min(best, (time.process_time() - started) / times)
    return best


def some_hashes(random: Random, count: int) -> array[int]:
    """Hashes that no other prompt has."""
    return array("Q", random.randbytes(8 * count))


def stored(sequence: int, hashes: array[int]) -> EventBatch:
    """An event batch that stores blocks."""
    return EventBatch(0, sequence, (BlockOp(CacheOperation.STORED, Tier.DEVICE, pack_u64(hashes)),))


def index_of(workers: int) -> tuple[BlockIndex, list[WorkerRank]]:
    """An empty index and its ranks."""
    index, slots = BlockIndex(), [WorkerRank(f"worker-{number}", 0) for number in range(workers)]
    for slot in slots:
        index.open(slot, 1, PLENTY)
    return index, slots


def match_rates(random: Random) -> list[dict[str, Any]]:
    """Matching prompts of several lengths, each worker holding another share of them."""
    rows = []
    for workers in (8, 100, 1000):
        for blocks in (64, 512, 2048, 6250, 25_000, 100_000):
            prompt = some_hashes(random, blocks)
            index, slots = index_of(workers)
            holders = slots if workers == 8 else random.sample(slots, 8)
            for slot in slots:
                index.apply(slot, 1, stored(1, prompt[:32]))
            for slot in holders:
                index.apply(slot, 1, stored(2, prompt[: random.randint(32, blocks)]))
            took = seconds_each(lambda index=index, prompt=prompt: index.match(prompt), 200)  # type: ignore[misc]
            rows.append({"what": "match", "workers": workers, "blocks": blocks, "us": took * 1e6, "per_s": 1 / took})
    return rows


def apply_rate(random: Random, events: int = 20_000) -> dict[str, Any]:
    """Applying event batches of 8 blocks from 8 workers."""
    batches = [stored(number // 8 + 1, some_hashes(random, 8)) for number in range(events)]
    best = float("inf")
    for _ in range(ROUNDS):
        index, slots = index_of(8)
        started = time.process_time()
        for number, batch in enumerate(batches):
            index.apply(slots[number % 8], 1, batch)
        best = min(best, (time.process_time() - started) / events)
    return {"what": "apply", "workers": 8, "blocks": 8, "us": best * 1e6, "per_s": 1 / best}


def hash_rates(random: Random) -> list[dict[str, Any]]:
    """Hashing prompts by their token ids."""
    rows = []
    for tokens in (1_000, 8_192, 32_000, 100_000):
        packed = pack_u32(array("I", (random.randrange(128_000) for _ in range(tokens))))
        took = seconds_each(lambda packed=packed: block_hashes(packed, BLOCK_SIZE), 20)  # type: ignore[misc]
        blocks = tokens // BLOCK_SIZE
        rows.append({"what": "hash", "workers": 0, "blocks": blocks, "us": took * 1e6, "per_s": 1 / took})
    return rows


def view_bytes_per_block(random: Random, blocks: int = 1_000_000, workers: int = 8) -> float:
    """Memory of an index in which every block lies on one worker, the dearest case."""
    index, slots = index_of(workers)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(blocks // 1000):
        index.apply(slots[number % workers], 1, stored(number // workers + 1, some_hashes(random, 1000)))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.distinct_blocks == blocks
    return (after - before) / blocks
