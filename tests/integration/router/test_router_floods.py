"""A worker that floods, lies or babbles is cut off, counted and named in the log; the others are served on."""

from __future__ import annotations

from functools import partial

import pytest

from services.common.base.packing import pack_u32, pack_u64
from services.common.types.hashing import block_hashes
from services.router.registration.stream_messages import MIN_HASHES
from sluice.v1 import common_pb2, router_pb2
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

PROMPT = list(range(640))


async def served(router: RouterProcess) -> str:
    prompt = router_pb2.PromptRef(token_ids=pack_u32(PROMPT))
    answer = await router.stub.RouteQuery(router_pb2.RouteQueryRequest(model=MODEL, prompt=prompt), timeout=20)
    assert answer.overlap.device_blocks == len(PROMPT) // BLOCK
    return str(answer.decode.worker_id)


async def names(router: RouterProcess) -> list[str]:
    return [each.worker_id for each in (await router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers]


def has_ended(worker: FakeWorker) -> bool:
    return worker.ended is not None


def cut_off(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(each, "worker", "") for each in caplog.records if "disconnecting worker" in each.message]


async def test_a_worker_that_floods_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async with routers() as (router,):
        good, bad = FakeWorker("good"), FakeWorker("bad", total_blocks=50_000)
        await good.attach(router)
        good.keep_beating()
        await good.store(block_hashes(PROMPT, BLOCK))
        await bad.attach(router)
        some = pack_u64(range(50_000))
        stored = router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=some))
        removed = router_pb2.KvEvent(removed=router_pb2.BlocksRemoved(block_hashes=some))
        for sequence in range(1, MIN_HASHES // 100_000 + 2):
            batch = router_pb2.KvEventBatch(sequence=sequence, events=[stored, removed])
            await bad.write(router_pb2.AttachRequest(events=batch))
        await until(lambda: bad.ended is not None)
        assert cut_off(caplog) == ["bad"]

        async def gone() -> bool:
            return await names(router) == ["good"]

        await until(gone)
        assert await served(router) == "good"


async def test_blocks_beyond_the_card_and_garbage_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    too_many = router_pb2.BlocksStored(block_hashes=pack_u64(range(1_000, 1_101)), tier=common_pb2.CACHE_TIER_DEVICE)
    torn = router_pb2.BlocksStored(block_hashes=b"\x00" * 12)
    async with routers() as (router,):
        good = FakeWorker("good")
        await good.attach(router)
        good.keep_beating()
        await good.store(block_hashes(PROMPT, BLOCK))
        for name, nonsense in (("liar", too_many), ("babbler", torn)):
            bad = FakeWorker(name, total_blocks=100)
            await bad.attach(router)
            await bad.store([5, 6, 7])
            batch = router_pb2.KvEventBatch(sequence=2, events=[router_pb2.KvEvent(stored=nonsense)])
            await bad.write(router_pb2.AttachRequest(events=batch))
            await until(partial(has_ended, bad))
        assert cut_off(caplog) == ["liar", "babbler"]

        async def only_good() -> bool:
            dumps = [each async for each in router.stub.DumpIndex(router_pb2.DumpIndexRequest())]
            return [each.worker_id for each in dumps] == ["good"]

        await until(only_good)
        assert await served(router) == "good"
