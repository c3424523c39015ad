"""What callers can ask of RouteQuery over gRPC: sessions, waiting, pairs, OpenAI bodies, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32, pack_u64
from services.common.types.hashing import HASH_SCHEME, block_hashes
from sluice.v1 import common_pb2, router_pb2
from tests.support.clients.callers import RESERVE, prompt, query, refused
from tests.support.data.loaded_tokenizers import tekken
from tests.support.servers.preprocess_server import preprocess
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until


async def attached(router: RouterProcess, *names: str, role: int = 0, **card: Any) -> list[FakeWorker]:
    await until(lambda: _lists(router))
    workers = [FakeWorker(name, **card) for name in names]
    for worker in workers:
        worker.registration.role = common_pb2.WorkerRole.ValueType(role)
        await worker.attach(router)
        worker.keep_beating()
    return workers


async def requests(router: RouterProcess) -> dict[str, int]:
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    return {load.worker_id: load.requests for load in loads}


def settings_of(redis: RedisServer, folder: Path) -> dict[str, Any]:
    """Settings of replicas that share Redis, under a prefix of the test's own."""
    return {"redis_url": redis.url, "redis_prefix": folder.name, "redis_timeout_s": 10}


async def _lists(router: RouterProcess, count: int | None = None) -> bool:
    """Whether it is ready, and knows so many workers."""
    try:
        workers = (await router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
    except grpc.aio.AioRpcError:
        return False
    return count is None or len(workers) == count


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_sessions_stay_where_they_were_at_every_replica(
    shared: bool, shared_redis: RedisServer, tmp_path: Path
) -> None:
    more = settings_of(shared_redis, tmp_path) if shared else {}
    async with routers(2 if shared else 1, drain_s=5, **more) as replicas:
        workers = await attached(replicas[0], "a", "b")
        for replica in replicas:
            await until(partial(_lists, replica, 2))
        first = await replicas[0].stub.RouteQuery(query(prompt(*range(64)), "r1", session_id="s"))
        assert not first.session_hit
        again = await replicas[-1].stub.RouteQuery(query(prompt(*range(500, 564)), "r2", session_id="s"))
        assert (again.decode.worker_id, again.session_hit) == (first.decode.worker_id, True)
        await {worker.worker_id: worker for worker in workers}[first.decode.worker_id].detach()
        await until(lambda: _lists(replicas[-1], 1))
        moved = await replicas[-1].stub.RouteQuery(query(prompt(*range(64)), "r3", session_id="s"))
        assert (moved.decode.worker_id == first.decode.worker_id, moved.session_hit) == (False, False)


async def test_a_pair_is_told_in_the_headers_of_three_schedulers() -> None:
    async with routers(drain_s=5) as (router,):
        await attached(router, "p", role=common_pb2.WORKER_ROLE_PREFILL, data_parallel_size=2)
        await attached(router, "d", role=common_pb2.WORKER_ROLE_DECODE)
        answer = await router.stub.RouteQuery(query(prompt(*range(64))))
        rank = str(answer.prefill.data_parallel_rank)
        assert dict(answer.headers) == {
            "x-gateway-destination-endpoint": "d.test:50051",
            "x-sluice-worker": "d",
            "x-sluice-dp-rank": "0",
            "x-sluice-prefill-worker": "p",
            "x-sluice-prefill-dp-rank": rank,
            "x-dynamo-worker-instance-id": "d",
            "x-dynamo-dp-rank": "0",
            "x-dynamo-routing-mode": "disaggregated",
            "x-worker-instance-id": "d",
            "x-dp-rank": "0",
            "x-prefiller-host-port": "p.test:50051",
            "x-dynamo-prefill-instance-id": "p",
            "x-dynamo-prefill-dp-rank": rank,
            "x-prefill-instance-id": "p",
            "x-prefill-dp-rank": rank,
        }


async def test_candidates_scores_costs_and_policies_work_together() -> None:
    async with routers(drain_s=5) as (router,):
        workers = await attached(router, "a", "b", "c")
        hashes = block_hashes(range(64), BLOCK)
        await workers[0].store(hashes)
        await workers[1].store(hashes[:2])
        ref = router_pb2.PromptRef(block_hashes=pack_u64(hashes), block_size=BLOCK)
        subset = router_pb2.CandidateSet(worker_ids=["b", "c"])
        even = router_pb2.CostOverrides(prefill_load_scale=1)
        answer = await router.stub.RouteQuery(query(ref, candidates=subset, explain=True, cost=even))
        assert (answer.decode.worker_id, answer.best_overlap_blocks, answer.tokens_to_compute) == ("b", 2, 32)
        assert [(score.worker_id, score.cost) for score in answer.scores] == [("b", 4), ("c", 8)]
        blind = router_pb2.CostOverrides(device_credit=0, prefill_load_scale=2)
        answer = await router.stub.RouteQuery(query(ref, explain=True, cost=blind))
        assert {score.worker_id: score.cost for score in answer.scores} == {"a": 8, "b": 10, "c": 12}
        for policy in ("round_robin", "random", "least_loaded", "power_of_two"):
            answer = await router.stub.RouteQuery(query(ref, candidates=subset, policy=policy, explain=True))
            assert answer.decode.worker_id in {"b", "c"}
            assert {score.worker_id for score in answer.scores} <= {"b", "c"}
        hot = router_pb2.CostOverrides(temperature=100)
        chosen = [await router.stub.RouteQuery(query(ref, cost=hot)) for _ in range(100)]
        assert {each.decode.worker_id for each in chosen} == {"a", "b", "c"}
        one = router_pb2.CandidateSet(worker_ids=["c"])
        direct = await router.stub.RouteQuery(query(ref, "r", candidates=one, policy="direct", session_id="s"))
        assert direct.decode.worker_id == "c"


def body(**fields: Any) -> router_pb2.PromptRef:
    return router_pb2.PromptRef(openai_body=json.dumps(fields).encode())


async def test_openai_bodies_meet_the_cache_that_their_tokens_made() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    chat: list[dict[str, Any]] = [{"role": "user", "content": text}]
    async with preprocess() as address, routers(drain_s=5, preprocess=[address]) as (router,):
        a, _ = await attached(router, "a", "b")
        await until(lambda: _answers(router, body(prompt="x")))
        plain = tekken().encode_text(text)
        await a.store(block_hashes(plain, BLOCK))
        for ref in (body(prompt=text), body(prompt=list(plain)), body(prompt=[text])):
            answer = await router.stub.RouteQuery(query(ref))
            assert answer.decode.worker_id == "a"
            assert answer.overlap.device_blocks == len(plain) // BLOCK
            assert answer.tokens_to_compute == len(plain) % BLOCK
        chatted = await router.stub.RouteQuery(query(body(messages=chat), "chat"))
        assert (chatted.overlap.device_blocks, chatted.tokens_to_compute > len(plain)) == (0, True)
        overlaps = await router.stub.GetOverlaps(router_pb2.GetOverlapsRequest(model=MODEL, prompt=body(prompt=text)))
        assert [each.worker_id for each in overlaps.overlaps] == ["a"]
        added = await router.stub.AddRequest(
            router_pb2.AddRequestRequest(request_id="own", model=MODEL, worker_id="a", prompt=body(prompt=text))
        )
        assert added.overlap.device_blocks == len(plain) // BLOCK


async def test_query_that_asks_for_token_ids_returns_the_prompt_as_routed() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    plain = list(tekken().encode_text(text))
    hashes = pack_u64(block_hashes(plain, BLOCK))
    async with preprocess() as address, routers(drain_s=5, preprocess=[address]) as (router,):
        await attached(router, "a")
        await until(lambda: _answers(router, body(prompt="x")))

        async def routed(ref: router_pb2.PromptRef, request_id: str = "", **more: Any) -> tuple[bytes, bytes, str, int]:
            found = await router.stub.RouteQuery(query(ref, request_id, return_token_ids=True, **more))
            return found.token_ids, found.block_hashes, found.hash_scheme, found.block_size

        whole = (pack_u32(plain), hashes, HASH_SCHEME, BLOCK)
        by_hashes = router_pb2.PromptRef(block_hashes=hashes, block_size=BLOCK, prompt_tokens=len(plain))
        assert await routed(body(prompt=text)) == whole
        assert await routed(body(prompt=text), "booked") == whole
        assert await routed(body(prompt=text), "booked") == whole, "a repeated call answers the same"
        assert await routed(prompt(*plain)) == whole
        assert await routed(by_hashes) == (b"", *whole[1:])
        assert await routed(router_pb2.PromptRef(prompt_tokens=100)) == (b"", b"", "", 0)
        assert await routed(prompt(5, 6)) == (pack_u32([5, 6]), b"", "", 0)
        salted = await routed(body(prompt=text, cache_salt="tenant"))
        assert salted == (whole[0], pack_u64(block_hashes(plain, BLOCK, "", "tenant")), HASH_SCHEME, BLOCK)
        silent = await router.stub.RouteQuery(query(body(prompt=text)))
        assert (silent.token_ids, silent.block_hashes, silent.hash_scheme, silent.block_size) == (b"", b"", "", 0)


async def _answers(router: RouterProcess, ref: router_pb2.PromptRef) -> bool:
    try:
        await router.stub.RouteQuery(query(ref))
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_what_preprocess_refuses_is_said_as_it_says_it() -> None:
    async with preprocess() as address, routers(drain_s=5, preprocess=[address]) as (router,):
        await attached(router, "a")
        await until(lambda: _answers(router, body(prompt="x")))
        error = await refused(router.stub.RouteQuery(query(body(messages=[{"role": "wizard", "content": "hi"}]))))
        assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "messages[0].role")
        broken = await refused(router.stub.RouteQuery(query(router_pb2.PromptRef(openai_body=b"{"))))
        assert (broken.kind, broken.param) == (ErrorKind.INVALID_ARGUMENT, "prompt.openai_body")
        both = router_pb2.PromptRef(openai_body=b'{"prompt":"x"}', token_ids=pack_u32([1]))
        assert (await refused(router.stub.RouteQuery(query(both)))).kind is ErrorKind.INVALID_ARGUMENT


async def test_bodies_need_a_preprocess_service() -> None:
    async with routers(drain_s=5) as (router,):
        await attached(router, "a")
        error = await refused(router.stub.RouteQuery(query(body(prompt="x"))))
        assert (error.kind, error.code) == (ErrorKind.FAILED_PRECONDITION, "no_preprocess")
    async with routers(drain_s=5, preprocess=["127.0.0.1:1"]) as (router,):
        await attached(router, "a")
        assert (await refused(router.stub.RouteQuery(query(body(prompt="x"))))).kind is ErrorKind.UNAVAILABLE


BAD: list[tuple[dict[str, Any], ErrorKind, str]] = [
    ({"model": "unknown"}, ErrorKind.NOT_FOUND, "model"),
    ({"candidates": router_pb2.CandidateSet()}, ErrorKind.FAILED_PRECONDITION, "candidates"),
    ({"candidates": router_pb2.CandidateSet(worker_ids=["unknown"])}, ErrorKind.UNAVAILABLE, ""),
    ({"prompt": router_pb2.PromptRef(token_ids=b"abc")}, ErrorKind.INVALID_ARGUMENT, "prompt.token_ids"),
    (
        {"prompt": router_pb2.PromptRef(block_hashes=bytes(12), block_size=BLOCK)},
        ErrorKind.INVALID_ARGUMENT,
        "prompt.block_hashes",
    ),
    ({"prompt": router_pb2.PromptRef(block_hashes=bytes(8))}, ErrorKind.INVALID_ARGUMENT, "prompt.block_size"),
    (
        {"prompt": router_pb2.PromptRef(block_hashes=bytes(8), block_size=BLOCK + 1)},
        ErrorKind.FAILED_PRECONDITION,
        "prompt.block_size",
    ),
    (
        {"prompt": router_pb2.PromptRef(block_hashes=bytes(8), block_size=BLOCK, hash_scheme="md5")},
        ErrorKind.INVALID_ARGUMENT,
        "prompt.hash_scheme",
    ),
    (
        {"prompt": router_pb2.PromptRef(block_hashes=bytes(8), block_size=BLOCK, token_ids=bytes(4))},
        ErrorKind.INVALID_ARGUMENT,
        "prompt",
    ),
    ({"policy": "best"}, ErrorKind.INVALID_ARGUMENT, "policy"),
    ({"policy": "direct"}, ErrorKind.INVALID_ARGUMENT, "candidates"),
    ({"mode": RESERVE}, ErrorKind.INVALID_ARGUMENT, "request_id"),
    ({"mode": RESERVE, "request_id": "r\0"}, ErrorKind.INVALID_ARGUMENT, "request_id"),
    ({"mode": 77}, ErrorKind.INVALID_ARGUMENT, "mode"),
    ({"session_id": "s" * 1000}, ErrorKind.INVALID_ARGUMENT, "session_id"),
    ({"cost": router_pb2.CostOverrides(temperature=-1)}, ErrorKind.INVALID_ARGUMENT, "cost.temperature"),
    ({"cost": router_pb2.CostOverrides(device_credit=1.5)}, ErrorKind.INVALID_ARGUMENT, "cost.device_credit"),
    ({"cost": router_pb2.CostOverrides(predicted_credit=-0.1)}, ErrorKind.INVALID_ARGUMENT, "cost.predicted_credit"),
    ({"cost": router_pb2.CostOverrides(host_credit=float("nan"))}, ErrorKind.INVALID_ARGUMENT, "cost.host_credit"),
    (
        {"cost": router_pb2.CostOverrides(prefill_load_scale=float("inf"))},
        ErrorKind.INVALID_ARGUMENT,
        "cost.prefill_load_scale",
    ),
]


async def test_what_makes_no_sense_is_refused_in_a_sentence_and_books_nothing() -> None:
    async with routers(drain_s=5) as (router,):
        await attached(router, "a", "b")
        for fields, kind, param in BAD:
            error = await refused(router.stub.RouteQuery(query(prompt(1, 2), **fields)))
            assert (error.kind, error.param) == (kind, param), fields
            assert error.message.endswith("."), fields
        for worker_id, rank in (("unknown", 0), ("a", 5)):
            add = router_pb2.AddRequestRequest(
                request_id="r", model=MODEL, worker_id=worker_id, data_parallel_rank=rank, prompt=prompt(1)
            )
            assert (await refused(router.stub.AddRequest(add))).kind is ErrorKind.NOT_FOUND
        assert await requests(router) == {"a": 0, "b": 0}
        assert (await router.stub.RouteQuery(query(prompt(1, 2)))).decode.worker_id in {"a", "b"}
