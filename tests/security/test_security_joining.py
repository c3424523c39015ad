"""Workers that join a model with another tokenizer, or whose server merely claims its name: no prompt reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base import budgets
from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind
from services.common.rpc.errors import from_rpc_error
from services.router.registration import stream as stream_module
from services.router.registration.joining import NAME_PINNED, TOKENIZER_DIFFERS, UNPROVEN_NAME, reason_to_set_aside
from services.router.registration.limits import RegistrationLimits
from services.router.registration.stream import WorkerStream
from services.router.rpc.workers import worker_of
from services.router.state.kv_index.events import WorkerUp
from services.router.state.store.base import Store
from services.router.state.store.memory import MemoryStore
from services.router.state.store.redis import RedisStore
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.registry import Registry
from services.router.state.workers.worker import Worker
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.fakes.hostile_worker import HostileWorker, card
from tests.support.oracles.errors import raises_error
from tests.support.servers.router_cluster import FakeWorker, RouterProcess, routers
from tests.support.servers.suite import Suite

REQUESTS = 24
STRANGERS = common_pb2.TokenizerSpec(processor="hf", fingerprint="f" * 64)


async def ask(url: str, count: int) -> set[int]:
    """Sends completions to the model at once; the statuses of the answers."""
    body = {"model": "tekken", "prompt": [1, 2, 3], "max_tokens": 2}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(count)))
    return {answer.status_code for answer in answers}


async def listed(router: str) -> dict[str, router_pb2.WorkerInfo]:
    async with grpc.aio.insecure_channel(router) as channel:
        stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
        return {
            worker.worker_id: worker for worker in (await stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
        }


@pytest.mark.parametrize(
    ("tokenizer", "named_by_server", "reason"),
    [(STRANGERS, False, TOKENIZER_DIFFERS), (STRANGERS, True, TOKENIZER_DIFFERS), (None, True, UNPROVEN_NAME)],
)
async def test_joiner_with_another_tokenizer_or_an_unproven_name_receives_no_prompt(
    attacked: Suite, tokenizer: common_pb2.TokenizerSpec | None, named_by_server: bool, reason: str
) -> None:
    more: dict[str, Any] = {"named_by_server": True} if named_by_server else {}
    async with HostileWorker("joiner", "tekken") as worker:
        router = attacked.address("router")
        attached = await worker.attach(router, card=card("tekken", tokenizer=tokenizer), **more)
        assert await ask(attacked.url, REQUESTS) == {200}
        assert not worker.starts
        workers = await listed(router)
        assert workers["joiner"].set_aside == reason
        assert not any(other.set_aside for name, other in workers.items() if name != "joiner")
        async with httpx.AsyncClient(base_url=attacked.url, timeout=30) as http:
            ready = (await http.get("/ready")).json()
            assert ready["set_aside"] == [{"model": "tekken", "reason": reason, "workers": 1}]
            await attached.close()
            while (await http.get("/ready")).json()["set_aside"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert any("set aside" in line for line in attacked.output)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore()
    if request.param == "redis":
        made = RedisStore(request.getfixturevalue("shared_redis").url, prefix=tmp_path.name, timeout_s=10)
    yield made
    await made.close()


def worker(name: str, fingerprint: str = "", prompts: str = "", *, named_by_server: bool = False) -> Worker:
    info = router_pb2.Registration(worker_id=name, address="h:1", epoch=1, card=card("m"))
    found = worker_of(info)
    return replace(found, fingerprint=fingerprint, prompt_fingerprint=prompts, named_by_server=named_by_server)


WORKERS = st.builds(
    worker,
    st.sampled_from("abcdef"),
    st.sampled_from(["", "1", "2"]),
    st.sampled_from(["", "x,y", "x,-", "z,y"]),
    named_by_server=st.booleans(),
)


@given(joining=st.lists(WORKERS, max_size=8))
def test_workers_of_a_model_that_receive_requests_never_have_tokenizers_that_differ(joining: list[Worker]) -> None:
    members: dict[str, Worker] = {}
    for one in joining:
        members[one.worker_id] = replace(one, set_aside=reason_to_set_aside(one, members.values()))
        for _ in members:  # as at the next heartbeats
            for name, member in members.items():
                if member.set_aside or member.named_by_server:
                    members[name] = replace(member, set_aside=reason_to_set_aside(member, members.values()))
    serving = [member for member in members.values() if member.accepts]
    assert bool(serving) == bool(members)
    for one in serving:
        assert reason_to_set_aside(one, serving) == ""


@asynccontextmanager
async def opened(store: Store, one: Worker, *others: Worker, pin_ms: int = 60_000) -> AsyncIterator[WorkerStream]:
    """A worker registered with a router just started."""
    view, health = ModelState("m", Registry(), None), StoreHealth(store)
    for other in others:
        view.apply(WorkerUp(other))
    keeping = asyncio.create_task(health.keep(lambda: asyncio.sleep(0)))
    await health.wait()
    stream = WorkerStream(one, store, health, view, 60_000, pin_ms=pin_ms)
    try:
        await stream.open()
        yield stream
        await stream.close()
    finally:
        keeping.cancel()


async def joined(store: Store, one: Worker, *others: Worker, pin_ms: int = 60_000) -> str:
    """The reason why a worker that registers with a router just started is set aside; it leaves again."""
    async with opened(store, one, *others, pin_ms=pin_ms) as stream:
        return stream.worker.set_aside


async def test_name_stays_with_its_tokenizer_after_its_workers_and_the_router_have_left(store: Store) -> None:
    assert await joined(store, worker("first", "1", named_by_server=True)) == ""
    assert await joined(store, worker("same", "1", named_by_server=True)) == ""
    assert await joined(store, worker("other", "2", named_by_server=True)) == NAME_PINNED
    assert await joined(store, worker("unknown", named_by_server=True)) == NAME_PINNED
    assert await joined(store, worker("unknown, stated")) == ""
    assert await joined(store, worker("still", "2", named_by_server=True)) == NAME_PINNED
    assert await joined(store, worker("stated", "2")) == ""
    assert await joined(store, worker("first", "1", named_by_server=True)) == NAME_PINNED
    assert await joined(store, worker("other", "2", named_by_server=True)) == ""


async def test_worker_set_aside_by_others_does_not_move_the_pin_of_the_name(store: Store) -> None:
    serving = worker("serving", "1")
    assert await joined(store, serving) == ""
    assert await joined(store, worker("stranger", "2"), serving) == TOKENIZER_DIFFERS
    assert await joined(store, worker("same", "1", named_by_server=True)) == ""


async def test_pin_of_a_name_ends_after_its_time_and_without_one_nothing_is_pinned(store: Store) -> None:
    assert await joined(store, worker("first", "1", named_by_server=True), pin_ms=1) == ""
    await asyncio.sleep(0.05)
    assert await joined(store, worker("other", "2", named_by_server=True), pin_ms=0) == ""
    assert await joined(store, worker("first", "1", named_by_server=True)) == ""


async def test_worker_held_to_a_pin_serves_once_an_operator_states_its_tokenizer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "JOIN_EVERY_S", 0.0)
    assert await joined(store, worker("first", "1")) == ""
    async with opened(store, worker("held", "2", named_by_server=True)) as held:
        await held.handle([])
        assert held.worker.set_aside == NAME_PINNED
        assert await joined(store, worker("stated", "2")) == ""
        await held.handle([])
        assert held.worker.set_aside == ""


def test_worker_set_aside_receives_requests_once_the_others_have_left() -> None:
    old, new = worker("old", "1"), worker("new", "2")
    assert reason_to_set_aside(new, [old, new]) == TOKENIZER_DIFFERS
    assert reason_to_set_aside(new, [replace(old, draining=True), new]) == ""


def test_worker_whose_operator_states_the_model_is_not_set_aside_for_one_whose_server_does() -> None:
    claimed, stated = worker("claimed", "1", named_by_server=True), worker("stated", "2")
    assert reason_to_set_aside(stated, [claimed]) == ""
    assert reason_to_set_aside(claimed, [stated]) == TOKENIZER_DIFFERS


def named(model: str, caller: str = "worker", worker_id: str = "w") -> Worker:
    return replace(worker(worker_id), model=model, caller=caller)


def test_names_that_one_caller_invents_are_bounded_and_leave_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    limits = RegistrationLimits(Budget("worker_models", 16, ""), lambda: now[0])
    refused: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    for number in range(16):
        limits.check(named(f"m{number}", worker_id=f"w{number}"), ())
    with raises_error(match="exceed|models", kind=ErrorKind.OVERLOADED, code="budget_exceeded"):
        limits.check(named("one-more"), ())
    limits.check(named("m3", worker_id="w3"), ())
    limits.check(named("theirs", caller="other"), ())
    assert refused == ["worker_models"]
    now[0] = 3_601.0
    limits.check(named("one-more"), ())


def test_registrations_of_a_worker_in_a_loop_are_refused_and_a_whole_fleet_is_not() -> None:
    limits = RegistrationLimits(Budget("worker_models", 16, ""), lambda: 0.0)
    for number in range(2_000):
        limits.check(named("m", worker_id=f"w{number}"), ())
    with raises_error(match="too often", kind=ErrorKind.OVERLOADED, code="flood"):
        for _ in range(100):
            limits.check(named("m", worker_id="w1"), ())
    with raises_error(match="Caller worker registers too often", code="flood"):
        for number in range(5_000):
            limits.check(named("m", worker_id=f"v{number}"), ())
    limits.check(named("m", caller="other"), ())


async def refusal(router: RouterProcess, worker_id: str, model: str) -> str:
    """Registers a worker, which leaves at once; returns the code of the refusal, empty if it is registered."""
    worker = FakeWorker(worker_id, model=model)
    try:
        await worker.attach(router)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "router").code
    await worker.detach()
    return ""


async def test_router_refuses_names_that_a_caller_invents_and_registrations_in_a_loop() -> None:
    async with routers() as (router,):
        await router.ready()
        names = [await refusal(router, f"w{number}", f"invented-{number}") for number in range(130)]
        assert names == [""] * 128 + ["budget_exceeded"] * 2
        assert "flood" in [await refusal(router, "w0", "invented-0") for _ in range(100)]
