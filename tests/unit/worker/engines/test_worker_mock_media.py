"""The mock engine with images: what it says of them, and what it caches."""

from __future__ import annotations

import asyncio
import json
import shutil
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.hashing import block_hashes
from services.common.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.worker.contract.cache_events import BlocksStored, KvEvent
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import (
    Delta,
    Disaggregation,
    FinishReason,
    GenerateRequest,
    MediaItem,
    Role,
    StopParams,
)
from services.worker.engines.mock import MockEngine
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.scheduler import MockScheduler
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.text import Answer
from services.worker.engines.mock.timing import FixedTiming
from services.worker.settings import WorkerSettings
from tests.support.oracles.errors import raises_error

PROMPT = list(range(20, 60))


RED, BLUE = (MediaFile(content_hash(data), data, "image/png") for data in (b"a red picture", b"a blue one"))


def item(file: MediaFile, offset: int, length: int = 8, encoder_tokens: int = 0) -> MediaItem:
    return MediaItem(MediaSpan(MediaKind.IMAGE, file.hash, offset, length, encoder_tokens=encoder_tokens), file)


def asked(*media: MediaItem, request_id: str = "r", **fields: Any) -> GenerateRequest:
    fields.setdefault("stop", StopParams(max_tokens=60))
    return GenerateRequest(request_id, "tiny", array("I", PROMPT), media=media, **fields)


@asynccontextmanager
async def started(folder: Path, **fields: Any) -> AsyncIterator[MockEngine]:
    settings = WorkerSettings(model=f"tiny={folder}", speedup=1e6, block_size=4, engine_args="media=image", **fields)
    engine = MockEngine.from_args(settings)
    await engine.start("w")
    try:
        yield engine
    finally:
        await engine.cleanup()


async def run(engine: MockEngine, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(60):
        return [delta async for delta in engine.generate(request, GenerateContext(request.request_id))]


def text_of(engine: MockEngine, deltas: list[Delta]) -> str:
    assert engine._loaded is not None
    return engine._loaded.vocabulary.decode([token_id for delta in deltas for token_id in delta.token_ids])


async def test_output_begins_with_a_description_of_each_image(folder: Path) -> None:
    async with started(folder) as engine:
        deltas = await run(engine, asked(item(RED, 4), item(BLUE, 20)))
        expected = "; ".join(f"image {len(file.data)} bytes {file.hash[:4].hex()}" for file in (RED, BLUE))
        assert text_of(engine, deltas).replace(" ", "").startswith(expected.replace(" ", ""))
        again = await run(engine, asked(item(RED, 4), item(BLUE, 20), request_id="again"))
        assert text_of(engine, again) == text_of(engine, deltas)


async def test_cache_reuses_blocks_only_of_the_same_images(folder: Path) -> None:
    async with started(folder) as engine:
        events: list[KvEvent] = []
        for source in engine.kv_event_sources():
            source.subscribe(events.extend)
        media = item(RED, 5), item(BLUE, 20)
        swapped = item(BLUE, 5), item(RED, 20)
        counts = [
            (await run(engine, asked(*items, request_id=str(number))))[-1].usage
            for number, items in enumerate([media, media, swapped, (media[0], replace(media[1], file=RED))])
        ]
    assert [usage and usage.cached_tokens for usage in counts[:3]] == [0, 36, 4]
    held = {value for event in events if isinstance(event, BlocksStored) for value in event.hashes}
    assert held >= {*block_hashes(PROMPT, 4, media=[each.span for each in media])}
    assert not held & {*block_hashes(PROMPT, 4)[1:]}


async def test_pair_of_workers_hands_over_a_prompt_with_images(folder: Path) -> None:
    media = item(RED, 5), item(BLUE, 20)
    async with (
        started(folder, role="prefill") as prefill,
        started(folder, role="decode") as decode,
        started(folder) as single,
    ):
        first = await run(prefill, asked(*media, disaggregation=Disaggregation(Role.PREFILL)))
        assert first[-1].finish_reason is FinishReason.HANDOFF
        handed = Disaggregation(Role.DECODE, first[-1].handoff)
        rest = await run(decode, asked(*media, disaggregation=handed))
        together = text_of(prefill, [*first, *rest])
        assert together == text_of(single, await run(single, asked(*media)))
        swapped = item(BLUE, 5), item(RED, 20)
        with raises_error(code="foreign_handoff"):
            await run(decode, asked(*swapped, disaggregation=handed, request_id="other"))


async def test_card_declares_images_for_a_model_with_a_vision_part(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "vision"
    shutil.copytree(folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    for path, kinds, expected in ((model, "", {"image"}), (folder, "", set()), (folder, "media=audio", {"audio"})):
        engine = MockEngine.from_args(WorkerSettings(model=f"tiny={path}", engine_args=kinds))
        card = await engine.start("w")
        await engine.cleanup()
        assert card.capabilities & {"image", "audio", "video"} == expected


def test_encoding_counts_items_not_covered_by_the_cache_once() -> None:
    scheduler = MockScheduler(
        BlockPool(64),
        FixedTiming(0.0, 1e6),
        lambda request, limit: Answer(array("I", [5, 6]), FinishReason.LENGTH),
        block_size=4,
        max_sequences=4,
        max_batched_tokens=16,
        max_waiting=4,
    )
    media = item(RED, 4, 8, encoder_tokens=100), item(BLUE, 20, 8)

    def steps() -> list[tuple[int, int, int]]:
        scheduler.submit(Sequence(asked(*media), 2, 0))
        done = []
        while scheduler.busy:
            step = scheduler.step(0.0)
            done.append((step.prefill_tokens, step.encoder_tokens, round(step.duration_s)))
        return done

    assert steps() == [(16, 100, 116), (16, 8, 24), (8, 0, 8), (0, 0, 0)]
    assert steps() == [(4, 0, 4), (0, 0, 0)]
