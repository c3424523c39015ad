"""The list of workers through restarts of routers: one without workers yet empties no list."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.backends.workers import registry as registry
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from sluice.v1 import common_pb2, router_pb2
from tests.support.waiting import until

KINDS = router_pb2.WorkerChange
AGGREGATED, UNKNOWN_ROLE = common_pb2.WORKER_ROLE_AGGREGATED, 99


class Router:
    """Tells what the test says; `restart` breaks the list off."""

    def __init__(self) -> None:
        self._changes: asyncio.Queue[router_pb2.WorkerChange | None] = asyncio.Queue()
        self.stub = self

    def pick(self) -> Router:
        return self

    def send(
        self, kind: KINDS.Kind.ValueType, *names: str, model: str = "m", role: int = AGGREGATED, media: str = ""
    ) -> None:
        for name in names or ("",):
            card = common_pb2.ModelCard(model=model, tokenizer=common_pb2.TokenizerSpec(media_fingerprint=media))
            known_role = common_pb2.WorkerRole.ValueType(role)
            worker = router_pb2.WorkerInfo(worker_id=name, address=f"{name}:1", role=known_role, card=card)
            self._changes.put_nowait(router_pb2.WorkerChange(kind=kind, worker=worker))

    def restart(self) -> None:
        self._changes.put_nowait(None)

    async def WatchWorkers(self, request: Any) -> AsyncIterator[router_pb2.WorkerChange]:
        while (change := await self._changes.get()) is not None:
            yield change
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


class Followed:
    """A catalogue that follows the router."""

    def __init__(self) -> None:
        self.router = Router()
        self.gone: list[str] = []
        self.registry = WorkerRegistry(cast(Any, self.router), self._up, self.gone.append)
        self._running = asyncio.create_task(self.registry.run())

    def _up(self, entry: WorkerEntry) -> None:
        assert entry.model

    async def until(self, *names: str, doubted: bool = False) -> None:
        await until(lambda: (sorted(self.registry.workers), self.registry.doubted) == (sorted(names), doubted), 20)

    def end(self) -> None:
        self._running.cancel()


@pytest.fixture
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(registry, "RETRY_S", 0.001)
    made = Followed()
    made.router.send(KINDS.KIND_UP, "a", "b")
    made.router.send(KINDS.KIND_SYNCED)
    await made.until("a", "b")
    yield made
    made.end()


async def test_a_model_is_described_by_one_and_the_same_of_its_workers(followed: Followed) -> None:
    assert followed.registry.models["m"] is followed.registry.model("m") is followed.registry.workers["a"]


async def test_a_worker_that_leaves_is_gone_at_once(followed: Followed) -> None:
    followed.router.send(KINDS.KIND_DOWN, "a")
    await followed.until("b")
    assert followed.gone == ["a"]


async def test_model_seen_after_many_others_have_gone_is_unavailable_and_the_oldest_unknown(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_REMEMBERED_MODELS", 3)
    for model in ("m1", "m2", "m3", "m4"):
        followed.router.send(KINDS.KIND_UP, model, model=model)
        followed.router.send(KINDS.KIND_DOWN, model, model=model)
    followed.router.send(KINDS.KIND_DOWN, "a", "b")
    await followed.until()
    kinds = {}
    for model in ("m1", "m2", "m3", "m4", "m"):
        with pytest.raises(SluiceError) as caught:
            followed.registry.model(model)
        kinds[model] = caught.value.kind
    gone, unknown = ErrorKind.UNAVAILABLE, ErrorKind.NOT_FOUND
    assert kinds == {"m1": unknown, "m2": unknown, "m3": gone, "m4": gone, "m": gone}


async def test_restarted_router_with_an_empty_list_keeps_workers_until_confirmed(followed: Followed) -> None:
    followed.router.restart()
    followed.router.send(KINDS.KIND_SYNCED)
    await followed.until("a", "b", doubted=True)
    assert followed.registry.model("m").model == "m"
    followed.router.send(KINDS.KIND_UP, "a")
    followed.router.send(KINDS.KIND_UP, "b")
    await followed.until("a", "b", doubted=False)
    assert followed.gone == []


async def test_unconfirmed_worker_is_removed_after_the_timeout(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "CONFIRM_S", 0.05)
    followed.router.restart()
    followed.router.send(KINDS.KIND_UP, "b")
    followed.router.send(KINDS.KIND_SYNCED)
    await followed.until("b")
    assert followed.gone == ["a"]


async def test_workers_are_removed_only_by_the_current_router(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "CONFIRM_S", 1.0)
    followed.router.restart()
    followed.router.send(KINDS.KIND_SYNCED)
    await followed.until("a", "b", doubted=True)
    followed.router.restart()
    followed.router.send(KINDS.KIND_UP, "a", "b")
    followed.router.send(KINDS.KIND_SYNCED)
    await followed.until("a", "b")
    await asyncio.sleep(1.5)
    assert followed.gone == []


async def test_worker_with_an_unknown_role_is_ignored_and_logged_once(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("new", "new", "a"):
        followed.router.send(KINDS.KIND_UP, name, role=UNKNOWN_ROLE)
    await followed.until("b")
    assert followed.gone == ["a"]
    ignored = [each for each in caplog.records if "worker ignored" in each.getMessage()]
    assert [each.__dict__["worker"] for each in ignored] == ["new", "a"]


async def test_worker_whose_media_fingerprint_differs_is_marked_at_its_registration(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.registry.compare_media({"m": "x,y"})
    followed.router.send(KINDS.KIND_UP, "c", media="x,z")
    followed.router.send(KINDS.KIND_UP, "d", media="x,y")
    await followed.until("a", "b", "c", "d")
    followed.registry.compare_media({})  # a replica that has not loaded the model yet
    assert [name for name, entry in followed.registry.workers.items() if entry.media_differ] == ["c"]
    assert caplog.text.count("the worker gets none of these kinds") == 1


async def test_mark_of_differing_images_follows_the_fingerprint_of_preprocess(followed: Followed) -> None:
    followed.router.send(KINDS.KIND_UP, "c", media="x,z")
    await followed.until("a", "b", "c")
    assert not followed.registry.workers["c"].media_differ
    followed.registry.compare_media({"m": "x,y"})
    assert followed.registry.workers["c"].media_differ
    followed.registry.compare_media({"m": "x,z"})
    assert not followed.registry.workers["c"].media_differ


def test_workers_of_a_name_after_every_change_are_those_of_a_scan() -> None:
    seeded = random.Random(3)
    registry = WorkerRegistry(cast(Any, None), lambda worker: None, lambda worker_id: None)
    for _ in range(500):
        worker_id = f"w{seeded.randrange(6)}"
        if seeded.random() < 0.4 and worker_id in registry.workers:
            del registry.workers[worker_id]
        else:
            adapters = tuple(seeded.sample(("x", "y", "a"), seeded.randrange(3)))
            entry = WorkerEntry(worker_id, "h:1", 1, seeded.choice("abc"), 16, 64, 256, frozenset(), 0)
            registry.workers[worker_id] = replace(entry, adapters=adapters)
        workers = registry.workers.values()
        for name in ("a", "b", "c", "x", "y", "none"):
            expected = [one for one in workers if one.model == name] or [one for one in workers if name in one.adapters]
            assert [*registry.of_model(name)] == expected
