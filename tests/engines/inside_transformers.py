"""Looks at the transformers engine from inside its own environment: what no caller over gRPC can see or provoke.

``python inside_transformers.py FOLDER WHAT``; prints "ok", or fails with an assertion.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

import torch

from services.common.base.errors import ErrorKind
from services.common.types.hashing import block_hashes
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, KvEvent
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopParams,
    StructuredOutput,
)
from services.worker.engines.transformers.engine import TransformersEngine
from services.worker.settings import WorkerSettings
from tests.support.waiting import until

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
                assert isinstance(event, BlocksRemoved)
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
    (allocator,) = cast(Any, started.runner).batch_processor.cache.cache_allocators.values()
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

    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 11}
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
    carried: dict[str, Any] = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0.0}
    whole = await tokens("whole", count=20, **carried)
    rest = await run(engine, "rest", [*prompt, *whole[:8]], 12, sampling=SamplingParams(**carried), resumed_tokens=8)
    assert [*whole[:8], *ids(rest)] == whole
    uniform = [await tokens(f"u{i}", count=1, temperature=1.0) for i in range(30)]
    assert len({one[0] for one in uniform}) > 1
    await engine.cleanup()


async def death(folder: str) -> None:
    """A lost device ends the thread: it is told at once, and requests hear a retryable error."""
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
        raise RuntimeError("CUDA error: the device is gone")

    cast(Any, started.runner).batch_processor.model_runner.compute_batch = broken
    began = time.monotonic()
    last = [delta async for delta in deltas][-1]
    assert last.error is not None
    assert last.error.retryable
    await until(lambda: bool(told))
    assert time.monotonic() - began < 2
    assert told == ["transformers-steps: CUDA error: the device is gone"]
    await engine.cleanup()


def beside(engine: TransformersEngine, name: str, **bad: Any) -> Coroutine[Any, Any, list[list[Delta]]]:
    """The outputs of 20 requests and, at last, of one with other fields, which run together."""
    options: list[dict[str, Any]] = [
        {"sampling": GREEDY},
        {"sampling": SamplingParams(temperature=1.0, seed=5)},
        {"sampling": SamplingParams(temperature=0.7, seed=6, top_p=0.9, top_k=20)},
        {"sampling": SamplingParams(temperature=0.0, presence_penalty=1.0), "logprobs": 2},
    ]
    runs = [run(engine, f"{name}-{i}", list(range(20 + i, 50 + i)), 24, **options[i % 4]) for i in range(20)]
    return asyncio.gather(*runs, run(engine, f"{name}-bad", list(range(300, 330)), 24, **bad))  # type: ignore[return-value]


def said(deltas: list[Delta]) -> tuple[list[int], list[Any]]:
    """Tokens and log-probabilities of a request that ended well, without the noise of other batches."""
    return ids(deltas), [position.chosen.token_id for delta in deltas for position in delta.logprobs]


async def rows(folder: str) -> None:
    """What one row raises, in each part of a step, ends its request; 20 beside it say what they say undisturbed."""
    engine = await engine_of(folder, total_blocks=512, max_sequences=32)
    told: list[str] = []
    engine.on_failure = lambda name, error: told.append(f"{name}: {error}")
    everything = {
        "sampling": SamplingParams(temperature=1.0, seed=3, presence_penalty=1.0, bad_words=((21, 22),)),
        "logprobs": 2,
        "guided": StructuredOutput("regex", "[a-z]{40}"),
    }
    undisturbed = [said(one) for one in (await beside(engine, "calm", **everything))[:-1]]
    batcher = engine._started.runner  # type: ignore[union-attr]

    def broken(*arguments: Any, **named: Any) -> Any:
        raise IndexError("index 542 is out of bounds for dimension 0")

    def poison(at: int, break_row: Callable[[Any], None]) -> None:
        """Breaks the request with a grammar from its token `at` on."""
        add = batcher.add

        def added(key: str, batch_request: Any, *more: Any) -> bool:
            if batch_request.sampler.constraint is not None:
                batch_request.sampler = breaking(batch_request.sampler, at, break_row)
            return bool(add(key, batch_request, *more))

        batcher.add = added  # type: ignore[method-assign]

    def breaking(sampler: Any, at: int, break_row: Callable[[Any], None]) -> Any:
        record, count = sampler.record, 0

        def recorded(token_id: int) -> None:
            nonlocal count
            count += 1
            record(token_id)
            if count == at:
                break_row(sampler)

        sampler.record = recorded
        if at == 0:
            break_row(sampler)
        return sampler

    def break_edit(sampler: Any) -> None:
        sampler.edit = broken

    def break_mask(sampler: Any) -> None:
        sampler.constraint.mask = broken

    def break_draw(sampler: Any) -> None:
        sampler.generator = object()

    def break_record(sampler: Any) -> None:
        sampler.record = broken

    def break_accept(sampler: Any) -> None:
        sampler.constraint.accept = broken

    def break_penalty(sampler: Any) -> None:
        sampler.history.counts = {1 << 40: 1}

    def break_logprobs(sampler: Any) -> None:
        sampler.plan = replace(sampler.plan, logprobs="two")

    def break_stop(sampler: Any) -> None:  # F2: the id that follows the last one of the vocabulary
        sampler.constraint = None
        sampler.plan = replace(sampler.plan, min_tokens=30, stop_ids=(engine._started.config.vocab_size,))  # type: ignore[union-attr]

    add = type(batcher).add.__get__(batcher)
    breaks = (
        break_edit,
        break_mask,
        break_draw,
        break_record,
        break_accept,
        break_penalty,
        break_logprobs,
        break_stop,
    )
    for break_row in breaks:
        for at in (0, 1, 7):
            name = f"{break_row.__name__}-{at}"
            await engine.clear_cache()
            poison(at, break_row)
            *others, bad = await beside(engine, name, **everything)
            batcher.add = add  # type: ignore[method-assign]
            assert [said(one) for one in others] == undisturbed, name
            error = bad[-1].error
            assert bad[-1].finish_reason is FinishReason.ERROR, name
            assert error is not None
            assert error.kind is ErrorKind.INTERNAL, name
            assert not error.retryable, name
            assert "542" not in error.message
            assert len([token for delta in bad for token in delta.token_ids]) <= at, name
    assert not told
    await quiet(engine)
    await engine.cleanup()


async def steps(folder: str) -> None:
    """A step that fails as a whole ends its requests as retryable; the engine goes on and holds nothing."""
    engine = await engine_of(folder)
    told: list[str] = []
    engine.on_failure = lambda name, error: told.append(f"{name}: {error}")
    calm = ids(await run(engine, "calm", list(range(20, 50)), 20))
    batcher: Any = engine._started.runner  # type: ignore[union-attr]
    processor = batcher.batch_processor
    runner = processor.model_runner
    compute, update, schedule = runner.compute_batch, processor.update_batch, processor.scheduler.schedule_batch

    def failing_once(work: Callable[..., Any], after: int, error: Exception) -> Callable[..., Any]:
        left = after

        def called(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise error
            return work(*arguments, **named)

        return called

    causes = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
        ValueError("of the library"),
    ]
    for number, error in enumerate(causes):
        for after in (1, 2, 9):
            for part in ("compute", "update", "schedule"):
                if part == "compute":
                    runner.compute_batch = failing_once(compute, after, error)
                elif part == "update":
                    processor.update_batch = failing_once(update, after, error)
                else:
                    processor.scheduler.schedule_batch = failing_once(schedule, after, error)
                name = f"{part}-{number}-{after}"
                runs = [run(engine, f"{name}-{i}", list(range(20 + i, 50 + i)), 20) for i in range(5)]
                outputs = await asyncio.gather(*runs)
                runner.compute_batch, processor.update_batch = compute, update
                processor.scheduler.schedule_batch = schedule
                failed = [one[-1].error for one in outputs if one[-1].error is not None]
                assert failed, name
                for failure in failed:
                    assert (failure.code, failure.retryable) == ("step_failed", True), (name, failure)
                    assert ("memory" in failure.message) == (number < 2), failure.message
                await engine.clear_cache()
                assert ids(await run(engine, f"{name}-later", list(range(20, 50)), 20)) == calm, name
                await quiet(engine)
    assert not told
    assert batcher.alive
    assert not batcher.batch_requests
    await engine.cleanup()


async def surface(folder: str) -> None:
    """The parts of the library that batching.py replaces are where it expects them."""
    engine = await engine_of(folder)
    started = engine._started
    assert started is not None
    processor = cast(Any, started.runner).batch_processor
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
    cases = {case.__name__: case for case in (overflow, events, sampling, death, rows, steps, surface)}
    asyncio.run(cases[sys.argv[2]](sys.argv[1]))
    print("ok")
