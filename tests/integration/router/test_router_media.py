"""Prompts with media items, with both stores: block hashes, the work of the encoder, and decision records."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32, pack_u64
from services.common.rpc.media import span_messages
from services.common.types.hashing import HASH_SCHEME, block_hashes
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash
from sluice.v1 import common_pb2, router_pb2
from tests.support.clients.callers import query, refusal, refused
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_cluster import BLOCK, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

TOKENS = list(range(100, 100 + 8 * BLOCK))
WORK_BLOCKS = 10
SPANS = [
    MediaSpan(MediaKind.IMAGE, content_hash(b"a"), BLOCK, BLOCK, encoder_tokens=WORK_BLOCKS * BLOCK),
    MediaSpan(MediaKind.IMAGE, content_hash(b"b"), 4 * BLOCK, 2 * BLOCK),
]
HASHES = block_hashes(TOKENS, BLOCK, media=SPANS)


def reference(spans: list[MediaSpan] = SPANS, **fields: Any) -> router_pb2.PromptRef:
    return router_pb2.PromptRef(**{"token_ids": pack_u32(TOKENS), "media": span_messages(spans), **fields})


@pytest.fixture(params=["memory", "redis"])
async def router(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RouterProcess]:
    more: dict[str, Any] = {}
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("shared_redis")
        more = {"redis_url": server.url, "redis_prefix": tmp_path.name, "redis_timeout_s": 10}
    async with routers(1, drain_s=5, **more) as (router,):
        await router.ready()
        yield router


async def attach(router: RouterProcess, *names: str) -> list[FakeWorker]:
    workers = [FakeWorker(name) for name in names]
    for worker in workers:
        await worker.attach(router)
        worker.keep_beating()
    return workers


async def loads(router: RouterProcess) -> dict[str, float]:
    answer = await router.stub.GetLoads(router_pb2.GetLoadsRequest())
    return {load.worker_id: load.prefill_blocks for load in answer.loads}


async def test_encoder_work_is_reserved_and_released_with_the_prefill(router: RouterProcess) -> None:
    await attach(router, "a")
    answer = await router.stub.RouteQuery(query(reference(), "r"))

    async def booked(blocks: float) -> bool:
        return (await loads(router))["a"] == pytest.approx(blocks)

    await until(lambda: booked(8 + WORK_BLOCKS + 2))
    decisions = await router.stub.GetDecisions(router_pb2.GetDecisionsRequest())
    assert [(decision.media_items, decision.cached_media_items) for decision in decisions.decisions] == [(2, 0)]
    await router.stub.MarkPrefillComplete(
        router_pb2.MarkPrefillCompleteRequest(reservation_ids=[answer.reservation_id])
    )
    await until(lambda: booked(0))


async def test_cached_images_are_not_encoded_again(router: RouterProcess) -> None:
    (worker, _) = await attach(router, "a", "b")
    await worker.store(HASHES[:2])

    async def found() -> bool:
        return (await router.stub.RouteQuery(query(reference()))).overlap.device_blocks == 2

    await until(found)
    for prompt in (
        reference(),
        reference(
            token_ids=b"",
            block_hashes=pack_u64(HASHES),
            hash_scheme=HASH_SCHEME,
            block_size=BLOCK,
            prompt_tokens=len(TOKENS),
        ),
    ):
        answer = await router.stub.RouteQuery(query(prompt, explain=True))
        costs = {score.worker_id: score.cost for score in answer.scores}
        assert answer.decode.worker_id == "a"
        # b computes the two blocks and encodes the first image; a block of prefill weighs 8, one held 1
        assert costs["b"] - costs["a"] == pytest.approx((2 + WORK_BLOCKS) * 8 + 2)
        override = router_pb2.CostOverrides(encoder_load_scale=0)
        answer = await router.stub.RouteQuery(query(prompt, explain=True, cost=override))
        costs = {score.worker_id: score.cost for score in answer.scores}
        assert costs["b"] - costs["a"] == pytest.approx(2 * 8 + 2)
    other = [SPANS[0], MediaSpan(MediaKind.IMAGE, content_hash(b"c"), 4 * BLOCK, 2 * BLOCK)]
    assert (await router.stub.RouteQuery(query(reference(other)))).overlap.device_blocks == 2
    swapped = [
        MediaSpan(MediaKind.IMAGE, content_hash(b"b"), BLOCK, BLOCK),
        MediaSpan(MediaKind.IMAGE, content_hash(b"a"), 4 * BLOCK, 2 * BLOCK),
    ]
    assert (await router.stub.RouteQuery(query(reference(swapped)))).overlap.device_blocks == 1
    await router.stub.RouteQuery(query(reference(), "r"))
    decisions = await router.stub.GetDecisions(router_pb2.GetDecisionsRequest())
    assert [(decision.media_items, decision.cached_media_items) for decision in decisions.decisions] == [(2, 1)]


async def test_media_outside_the_prompt_are_refused(router: RouterProcess) -> None:
    await attach(router, "a")
    outside = [MediaSpan(MediaKind.IMAGE, content_hash(b"a"), len(TOKENS) - 1, 2)]
    error = await refused(router.stub.RouteQuery(query(reference(outside))))
    assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "media")


async def test_registration_with_the_reserved_role_encode_is_refused(router: RouterProcess) -> None:
    worker = FakeWorker("e")
    worker.registration.role = common_pb2.WORKER_ROLE_ENCODE
    error = await refusal(router, worker)
    assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "registration.role")
    assert "ENCODE is reserved" in error.message
