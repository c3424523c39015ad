from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.discovery import tokenizer_delivery
from services.common.discovery.tokenizer_delivery import DiscoveredModel, RetainedModel, TokenizerDelivery
from services.common.discovery.worker_watch import ServedModel, WorkerWatch
from services.common.errors import ErrorKind, SluiceError

OLD, NEW = "0" * 64, "1" * 64


class StoredResponse:
    """A store that has every tokenizer, and knows which are held."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()

    def hold(self, wanted: str) -> bool:
        self.held[wanted] += 1
        return True

    def release(self, wanted: str, remove: bool = False) -> None:
        self.held[wanted] -= 1
        assert self.held[wanted] >= 0

    def find(self, wanted: str) -> Path:
        return Path("/kept") / wanted


def served(fingerprint: str, model: str = "m") -> ServedModel:
    return ServedModel("127.0.0.1:1", model, "hf", fingerprint, "mock")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it takes too long")


class Loaded:
    """A service that loads what it is given, and its models in the order of use.

    Attributes:
        most: models that were loaded at the same time.
        broken: models that cannot be loaded.
    """

    def __init__(self) -> None:
        self.models: dict[str, None] = {}
        self.most = 0
        self.broken: set[str] = set()
        self.ended: list[str] = []

    async def take(self, model: DiscoveredModel) -> None:
        if model.spec.name in self.broken:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "It is broken.")
        self.use(model.spec.name)
        self.most = max(self.most, len(self.models))

    async def end(self, model: DiscoveredModel) -> None:
        self.ended.append(model.spec.name)
        self.models.pop(model.spec.name, None)

    def use(self, model: str) -> None:
        self.models.pop(model, None)
        self.models[model] = None

    def by_use(self) -> Sequence[str]:
        return tuple(self.models)


def delivery_of(watch: WorkerWatch, loaded: Loaded, models: int, grace_s: float = 300.0) -> TokenizerDelivery:
    store: Any = StoredResponse()
    staying = RetainedModel(models, grace_s)
    return TokenizerDelivery("test", watch, store, (), loaded.take, None, loaded.end, staying, loaded.by_use)


async def test_a_worker_that_changes_its_tokenizer_while_it_is_learned_is_learned_anew() -> None:
    learning, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    taken: list[str] = []

    async def take(model: DiscoveredModel) -> None:
        learning.set()
        await go.wait()
        taken.append(model.fingerprint)
        if len(taken) == 2:
            done.set()

    watch, store = WorkerWatch(None), StoredResponse()
    bare: Any = store
    delivery = TokenizerDelivery("test", watch, bare, (), take)
    async with asyncio.timeout(20):
        watch._served["w"] = served(OLD)
        watch.on_change()
        await learning.wait()
        watch._served["w"] = served(NEW)
        watch.on_change()  # the last that is heard of this worker
        go.set()
        await done.wait()
        await until(lambda: not store.held[OLD])  # in a thread
    await delivery._tasks.close()
    assert taken == [OLD, NEW]
    assert store.held == {OLD: 0, NEW: 1}


async def test_request_for_one_model_too_many_replaces_the_least_recently_used_one() -> None:
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=2)
    async with asyncio.timeout(20):
        for model in "abc":
            watch._served[model] = served(OLD, model)
        watch.on_change()
        assert await delivery.wait_for("a", 10)
        assert await delivery.wait_for("b", 10)
        assert await delivery.wait_for("c", 10), "it had to wait for no worker to leave"
        assert loaded.ended == ["a"]
        loaded.use("b")
        assert await delivery.wait_for("a", 10)
        assert (loaded.ended, tuple(loaded.models), loaded.most) == (["a", "c"], ("b", "a"), 2)
    await delivery._tasks.close()


async def test_many_requests_for_more_models_than_fit_are_all_answered() -> None:
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=3)
    names = [f"m{number}" for number in range(12)]
    for name in names:
        watch._served[name] = served(OLD, name)
    watch.on_change()
    async with asyncio.timeout(20):
        assert all(await asyncio.gather(*(delivery.wait_for(name, 15) for name in names * 3)))
    assert loaded.most == 3
    await delivery._tasks.close()


async def test_models_that_cannot_be_loaded_take_no_place_and_say_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_delivery, "FAILED_S", 0.1)
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=2)
    loaded.broken = {"x", "y", "z"}
    for model in "xyz":
        watch._served[model] = served(OLD, model)
    watch.on_change()
    async with asyncio.timeout(20):
        with pytest.raises(SluiceError, match="'x' is not loaded: It is broken") as caught:
            await delivery.wait_for("x", 10)
        assert (caught.value.kind, caught.value.code) == (ErrorKind.UNAVAILABLE, "model_loading")
        for model in "ab":
            watch._served[model] = served(OLD, model)
        watch.on_change()
        assert await delivery.wait_for("a", 10)
        assert await delivery.wait_for("b", 10)
        monkeypatch.undo()
        loaded.broken.clear()
        assert await delivery.wait_for("x", 10), "it is tried again"
    assert loaded.most <= 2
    await delivery._tasks.close()


async def test_worker_that_returns_within_the_grace_keeps_its_model_loaded() -> None:
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=1)
    async with asyncio.timeout(20):
        watch._served["w"] = served(OLD, "a")
        watch.on_change()
        assert await delivery.wait_for("a", 10)
        del watch._served["w"]
        watch.on_change()
        watch._served["w"] = served(OLD, "a")
        watch.on_change()
        watch._served["v"] = served(OLD, "b")
        watch.on_change()  # there is no room for it, and no model that is leaving
        await asyncio.sleep(0)
        assert tuple(loaded.models) == ("a",)
        assert not loaded.ended
        del watch._served["w"]
        watch.on_change()  # now there is
        await until(lambda: tuple(loaded.models) == ("b",))
    await delivery._tasks.close()
