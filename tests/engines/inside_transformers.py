"""Looks at the transformers engine from inside its own environment: what no caller over gRPC can see or provoke.

``python inside_transformers.py FOLDER WHAT``; prints "ok", or fails with an assertion.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

from services.common.hashing import block_hashes
from services.worker.contract.cache_events import BlocksStored, KvEvent
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest, SamplingParams, StopParams
from services.worker.engines.transformers.engine import TransformersEngine
from services.worker.settings import WorkerSettings

GREEDY = SamplingParams(temperature=0.0)


async def engine_of(folder: str, **fields: Any) -> TransformersEngine:
    """A started engine with few blocks, where nothing else is said."""
    sizes = {"block_size": 16, "total_blocks": 64, "max_batched_tokens": 128, "max_sequences": 32}
    engine = TransformersEngine.from_args(WorkerSettings(**{"model": f"tiny={folder}", **sizes, **fields}))
    await engine.start("inside")
    return engine


async def run(engine: TransformersEngine, name: str, prompt: list[int], tokens: int, **fields: Any) -> list[Delta]:
    """All deltas of one request."""
    stop = fields.pop("stop", StopParams(max_tokens=tokens, ignore_eos=True))
    request = GenerateRequest(
        **{"request_id": name, "model": "tiny", "token_ids": array("I", prompt), "sampling": GREEDY, **fields},
        stop=stop,
    )
    return [delta async for delta in engine.generate(request, GenerateContext(name))]


def ids(deltas: list[Delta]) -> list[int]:
    """Tokens of a request that ended well."""
    assert deltas[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP), deltas[-1]
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def overflow(folder: str) -> None:
    """More requests than the cache holds: some are put back and computed again, and all say what they say alone."""
    engine = await engine_of(folder)
    prompts = [[20 + (7 * i + j) % 400 for j in range(40 + i)] for i in range(12)]
    alone = [ids(await run(engine, f"a{i}", prompt, 120)) for i, prompt in enumerate(prompts)]
    await engine.clear_cache()
    together = await asyncio.gather(*(run(engine, f"t{i}", prompt, 120) for i, prompt in enumerate(prompts)))
    assert [ids(one) for one in together] == alone
    await quiet(engine)
    await engine.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what comes from another thread."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def quiet(engine: TransformersEngine) -> None:
    """Waits until no block is held."""
    await until(lambda: engine.load()[0].used_blocks + engine.load()[0].running_requests == 0)


async def events(folder: str) -> None:
    """Events replayed are exactly the blocks that the cache can find again, under our hashes."""
    engine = await engine_of(folder)
    present: set[int] = set()

    def listen(news: Any) -> None:
        event: KvEvent
        for event in news:
            if isinstance(event, BlocksStored):
                assert present.isdisjoint(event.hashes)
                present.update(event.hashes)
            else:
                assert present.issuperset(event.hashes)
                present.difference_update(event.hashes)

    engine.kv_event_sources()[0].subscribe(listen)
    prompt = list(range(20, 90))
    answer = ids(await run(engine, "first", prompt, 30))
    # The last token has been chosen and not computed: its key and value are not in the cache.
    assert present == set(block_hashes([*prompt, *answer[:-1]], 16))
    salted = await run(engine, "salted", prompt, 2, cache_salt="tenant")
    assert salted[0].cached_tokens == 0
    assert present >= set(block_hashes(prompt, 16, cache_salt="tenant"))
    assert (await run(engine, "again", prompt, 2, cache_salt="tenant"))[0].cached_tokens == 64
    await asyncio.gather(*(run(engine, f"e{i}", list(range(30 + i, 130 + i)), 60) for i in range(20)))
    await quiet(engine)
    started = engine._started
    assert started is not None
    (allocator,) = started.runner.batch_processor.cache.cache_allocators.values()
    assert present == set(allocator.ledger.hash_to_block)
    await engine.clear_cache()
    await asyncio.sleep(0.1)
    assert not present
    assert (await run(engine, "cleared", prompt, 2))[0].cached_tokens == 0
    await engine.cleanup()


async def sampling(folder: str) -> None:
    """Each option does what it says, per request, in one batch with others."""
    engine = await engine_of(folder, total_blocks=512)
    prompt = list(range(20, 50))
    greedy = ids(await run(engine, "greedy", prompt, 20))

    async def tokens(name: str, count: int = 20, **options: Any) -> list[int]:
        return ids(await run(engine, name, prompt, count, sampling=SamplingParams(**options)))

    seeded = {"temperature": 1.0, "seed": 11}
    first, second, other, beside = await asyncio.gather(
        tokens("s1", **seeded),
        tokens("s2", **seeded),
        tokens("s3", temperature=1.0, seed=12),
        tokens("g", temperature=0.0),
    )
    assert first == second != other
    assert beside == greedy
    assert await tokens("s4", **seeded) == first
    assert await tokens("k1", top_k=1, temperature=1.5) == greedy
    assert await tokens("p0", top_p=1e-6, temperature=1.5) == greedy
    assert await tokens("m1", min_p=1.0, temperature=1.5) == greedy
    assert set(await tokens("allowed", temperature=1.0, allowed_token_ids=(33, 44))) <= {33, 44}
    assert set(await tokens("bias", temperature=0.0, logit_bias={77: 100.0})) == {77}
    assert greedy[0] not in await tokens("word", temperature=0.0, bad_words=((greedy[0],),))
    pair = await tokens("pair", temperature=0.0, bad_words=(tuple(greedy[:2]),))
    assert pair[0] == greedy[0]
    assert pair[1] != greedy[1]
    penalised = await tokens("presence", count=60, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    plain = await tokens("plain", count=60, temperature=0.0)
    assert len(set(penalised)) > len(set(plain))
    assert await tokens("repeat", temperature=0.0, repetition_penalty=1.5) != greedy
    # A request that goes on where another worker stopped counts what that one generated.
    carried = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0.0}
    whole = await tokens("whole", count=20, **carried)
    rest = await run(engine, "rest", [*prompt, *whole[:8]], 12, sampling=SamplingParams(**carried), resumed_tokens=8)
    assert [*whole[:8], *ids(rest)] == whole
    uniform = [await tokens(f"u{i}", count=1, temperature=1.0) for i in range(30)]
    assert len({one[0] for one in uniform}) > 1
    await engine.cleanup()


async def death(folder: str) -> None:
    """A step that fails ends the thread: it is told at once, and requests hear a retryable error."""
    engine = await engine_of(folder)
    told: list[str] = []
    engine.on_failure = lambda name, error: told.append(f"{name}: {error}")
    stream = DeltaStream()
    stop = StopParams(max_tokens=800, ignore_eos=True)
    prompt = array("I", range(20, 40))
    engine.submit(GenerateRequest("r", "tiny", prompt, sampling=GREEDY, stop=stop), GenerateContext("r"), stream)
    deltas = stream.deltas()
    await anext(deltas)
    started = engine._started
    assert started is not None

    def broken(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("the device is gone")

    started.runner.batch_processor.model_runner.compute_batch = broken
    began = time.monotonic()
    last = [delta async for delta in deltas][-1]
    assert last.error is not None
    assert last.error.retryable
    await until(lambda: bool(told))
    assert time.monotonic() - began < 2
    assert told == ["transformers-steps: the device is gone"]
    await engine.cleanup()


async def surface(folder: str) -> None:
    """The parts of the library that batching.py replaces are where it expects them."""
    engine = await engine_of(folder)
    started = engine._started
    assert started is not None
    processor = started.runner.batch_processor
    runner, cache, ios = processor.model_runner, processor.cache, processor.inputs_and_outputs
    assert not runner.pad_inputs
    assert not processor.use_async_batching
    assert not processor.logit_processor.do_processing
    for owner, names in (
        (runner, ("_sample", "compute_batch")),
        (processor, ("prepare_next_batch", "update_batch", "scheduler", "output_router")),
        (cache, ("search_prefix_match", "mark_complete_blocks", "evict_cached_blocks", "num_blocks", "num_sectors")),
        (ios, ("requests_in_batch",)),
        (processor.scheduler, ("_get_waiting_candidates", "active_requests", "waiting_requests")),
        (started.runner, ("_run_generation_loop", "_generation_thread", "pause", "cancel_request", "add_request")),
    ):
        for name in names:
            assert hasattr(owner, name), f"{type(owner).__name__}.{name}"
    await engine.cleanup()


if __name__ == "__main__":
    cases = {case.__name__: case for case in (overflow, events, sampling, death, surface)}
    asyncio.run(cases[sys.argv[2]](sys.argv[1]))
    print("ok")
