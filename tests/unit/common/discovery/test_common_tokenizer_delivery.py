from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.base import budgets
from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError
from services.common.discovery import model_discovery, tokenizer_store
from services.common.discovery.discovered_models import DiscoveredModel, RetainedModel
from services.common.discovery.model_discovery import ModelDiscovery
from services.common.discovery.tokenizer_fetch import HeldTokenizers
from services.common.discovery.tokenizer_store import IncomingTokenizer, TokenizerStore
from services.common.discovery.worker_watch import ServedModel, WorkerWatch
from services.common.packages.model_files import fingerprint
from tests.support.oracles.errors import raises_error
from tests.support.waiting import until

TOKENIZER_MB = 2
"""Estimated memory of a tokenizer without files."""
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

    async def add(self, model: DiscoveredModel) -> None:
        if model.spec.name in self.broken:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "It is broken.")
        self.use(model.spec.name)
        self.most = max(self.most, len(self.models))

    async def remove(self, model: DiscoveredModel) -> None:
        self.ended.append(model.spec.name)
        self.models.pop(model.spec.name, None)

    def use(self, model: str) -> None:
        self.models.pop(model, None)
        self.models[model] = None

    def by_use(self) -> Sequence[str]:
        return tuple(self.models)


def delivery_of(
    watch: WorkerWatch, loaded: Loaded, models: int, grace_s: float = 300.0, memory_mb: int = 1_024
) -> ModelDiscovery:
    store: Any = StoredResponse()
    staying = RetainedModel(models, grace_s, Budget("tokenizer_memory", memory_mb << 20, "--max-discovered-mb"))
    return ModelDiscovery("test", watch, HeldTokenizers(store), loaded, (), staying)


async def test_a_worker_that_changes_its_tokenizer_while_it_is_learned_is_learned_anew() -> None:
    learning, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    taken: list[str] = []

    class Host(Loaded):
        async def add(self, model: DiscoveredModel) -> None:
            learning.set()
            await go.wait()
            taken.append(model.fingerprint)
            if len(taken) == 2:
                done.set()

    watch, store = WorkerWatch(None), StoredResponse()
    bare: Any = store
    delivery = ModelDiscovery("test", watch, HeldTokenizers(bare), Host())
    async with asyncio.timeout(20):
        watch._served["w"] = served(OLD)
        delivery.refresh()
        await learning.wait()
        watch._served["w"] = served(NEW)
        delivery.refresh()  # the last that is heard of this worker
        go.set()
        await done.wait()
        await until(lambda: not store.held[OLD])  # in a thread
    await delivery.close()
    assert taken == [OLD, NEW]
    assert store.held == {OLD: 0, NEW: 1}


async def test_request_for_one_model_too_many_replaces_the_least_recently_used_one() -> None:
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=2)
    async with asyncio.timeout(20):
        for model in "abc":
            watch._served[model] = served(OLD, model)
        delivery.refresh()
        for model in "ab":  # loaded at once, in any order, and used in this one
            assert await delivery.wait_for(model, 10)
            loaded.use(model)
        await until(lambda: not any(model.task for model in delivery._models.values()))  # else it is not evicted yet
        assert await delivery.wait_for("c", 10), "it had to wait for no worker to leave"
        assert loaded.ended == ["a"]
        await until(lambda: not any(model.task for model in delivery._models.values()))
        loaded.use("b")
        assert await delivery.wait_for("a", 10)
        assert (loaded.ended, tuple(loaded.models), loaded.most) == (["a", "c"], ("b", "a"), 2)
    await delivery.close()


async def test_models_with_one_tokenizer_take_its_memory_once() -> None:
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=100, memory_mb=TOKENIZER_MB)
    for number in range(50):
        watch._served[str(number)] = served(OLD, f"m{number}")
    delivery.refresh()
    async with asyncio.timeout(20):
        await until(lambda: len(loaded.models) == 50)
    assert delivery._memory.used_bytes == TOKENIZER_MB << 20
    await delivery.close()


async def test_models_beyond_the_memory_wait_for_requests_which_replace_the_least_recently_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: Counter[str] = Counter()
    monkeypatch.setattr(budgets, "on_refused", lambda name: refused.update([name]))
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=100, memory_mb=2 * TOKENIZER_MB)
    names = [f"m{number}" for number in range(6)]
    for number, name in enumerate(names):
        watch._served[name] = served(f"{number:064d}", name)
    delivery.refresh()
    async with asyncio.timeout(20):
        await until(lambda: not any(model.task for model in delivery._models.values()))
        assert (len(loaded.models), refused["tokenizer_memory"]) == (2, 4)
        (oldest, kept), (other, *_) = loaded.models, [name for name in names if name not in loaded.models]
        assert await delivery.wait_for(other, 10)
        assert (loaded.ended, tuple(loaded.models)) == ([oldest], (kept, other))
        assert all(await asyncio.gather(*(delivery.wait_for(name, 15) for name in names)))
    assert loaded.most == 2
    await delivery.close()


async def test_model_that_exceeds_the_memory_alone_is_refused_by_name_and_replaces_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_discovery, "FAILED_S", 0.1)
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=100, memory_mb=TOKENIZER_MB)
    watch._served["a"] = served(OLD, "a")
    delivery.refresh()
    async with asyncio.timeout(20):
        assert await delivery.wait_for("a", 10)
        monkeypatch.setattr(delivery._memory, "estimate", lambda path: (TOKENIZER_MB + 1) << 20)
        watch._served["b"] = served(NEW, "b")
        delivery.refresh()
        with raises_error(match="--max-discovered-mb", kind=ErrorKind.UNAVAILABLE, code="model_loading"):
            await delivery.wait_for("b", 10)
    assert tuple(loaded.models) == ("a",)
    await delivery.close()


async def test_many_requests_for_more_models_than_fit_are_all_answered() -> None:
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=3)
    names = [f"m{number}" for number in range(12)]
    for name in names:
        watch._served[name] = served(OLD, name)
    delivery.refresh()
    async with asyncio.timeout(20):
        assert all(await asyncio.gather(*(delivery.wait_for(name, 15) for name in names * 3)))
    assert loaded.most == 3
    await delivery.close()


async def test_models_that_fail_to_load_take_no_slot_and_raise_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_discovery, "FAILED_S", 0.1)
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=2)
    loaded.broken = {"x", "y", "z"}
    for model in "xyz":
        watch._served[model] = served(OLD, model)
    delivery.refresh()
    async with asyncio.timeout(20):
        with raises_error(match="'x' is not loaded: It is broken", kind=ErrorKind.UNAVAILABLE, code="model_loading"):
            await delivery.wait_for("x", 10)
        for model in "ab":
            watch._served[model] = served(OLD, model)
        delivery.refresh()
        assert await delivery.wait_for("a", 10)
        assert await delivery.wait_for("b", 10)
        monkeypatch.undo()
        loaded.broken.clear()
        assert await delivery.wait_for("x", 10), "it is tried again"
    assert loaded.most <= 2
    await delivery.close()


async def test_worker_that_returns_within_the_grace_keeps_its_model_loaded() -> None:
    watch, loaded = WorkerWatch(None), Loaded()
    delivery = delivery_of(watch, loaded, models=1)
    async with asyncio.timeout(20):
        watch._served["w"] = served(OLD, "a")
        delivery.refresh()
        assert await delivery.wait_for("a", 10)
        del watch._served["w"]
        delivery.refresh()
        watch._served["w"] = served(OLD, "a")
        delivery.refresh()
        watch._served["v"] = served(OLD, "b")
        delivery.refresh()  # there is no room for it, and no model to be unloaded
        await asyncio.sleep(0)
        assert tuple(loaded.models) == ("a",)
        assert not loaded.ended
        del watch._served["w"]
        delivery.refresh()  # now there is
        await until(lambda: tuple(loaded.models) == ("b",))
    await delivery.close()


FILES = {"tokenizer.json": b"{}", "config.json": b'{"a": 1}', "chat_template.jinja": b""}


def print_of(files: dict[str, bytes], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return fingerprint(folder)


@pytest.fixture
def store(tmp_path: Path) -> TokenizerStore:
    return TokenizerStore(tmp_path / "cache" / "tokenizers")


def send(incoming: IncomingTokenizer, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        half = len(data) // 2
        incoming.add(name, len(data), data[:half])
        incoming.add(name, len(data), data[half:])


def test_what_is_complete_is_found(store: TokenizerStore, tmp_path: Path) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    assert store.find(wanted) is None
    incoming = store.receive(wanted)
    send(incoming, FILES)
    assert store.find(wanted) is None  # not before it was checked
    path = incoming.keep()
    assert store.find(wanted) == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert [entry.name for entry in path.parent.iterdir()] == [wanted]


@pytest.mark.parametrize("damage", ["gone", "missing", "changed", "more"])
def test_what_was_damaged_since_is_not_found_and_can_be_stored_anew(
    store: TokenizerStore, tmp_path: Path, damage: str
) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    incoming = store.receive(wanted)
    send(incoming, FILES)
    path = incoming.keep()
    if damage == "gone":
        for file in path.iterdir():
            file.unlink()
    elif damage == "missing":  # cleaners of caches take files that were not opened for long
        (path / "chat_template.jinja").unlink()
    elif damage == "changed":
        (path / "config.json").write_bytes(b'{"a": 2}')
    else:
        (path / "tokenizer_config.json").write_bytes(b"{}")
    assert store.find(wanted) is None
    again = store.receive(wanted)
    send(again, FILES)
    assert store.find(wanted) is None
    path = again.keep()
    assert store.find(wanted) == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert [entry.name for entry in path.parent.iterdir()] == [wanted]


def test_of_two_who_store_the_same_both_succeed(store: TokenizerStore, tmp_path: Path) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    one, other = store.receive(wanted), store.receive(wanted)
    send(one, FILES)
    send(other, FILES)
    assert one.keep() == other.keep() == store.find(wanted)
    assert len(list((tmp_path / "cache/tokenizers").iterdir())) == 1


def test_content_that_does_not_match_is_refused_and_leaves_nothing(store: TokenizerStore, tmp_path: Path) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    incoming = store.receive(wanted)
    send(incoming, {**FILES, "config.json": b'{"a": 2}'})
    with raises_error(match="does not match its fingerprint", kind=ErrorKind.INVALID_ARGUMENT, code="bad_tokenizer"):
        incoming.keep()
    incoming.drop()
    assert store.find(wanted) is None
    assert not list((tmp_path / "cache/tokenizers").iterdir())


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b", "a\nb", "x" * 200, "a\\b"]
)
def test_names_that_could_lead_elsewhere_are_refused(store: TokenizerStore, name: str) -> None:
    incoming = store.receive("0" * 64)
    with pytest.raises(SluiceError):
        incoming.add(name, 1, b"x")
    incoming.drop()


def test_pieces_must_fit_what_was_announced(store: TokenizerStore) -> None:
    incoming = store.receive("0" * 64)
    with pytest.raises(SluiceError, match="longer than announced"):
        incoming.add("tokenizer.json", 1, b"xy")
    incoming = store.receive("0" * 64)
    incoming.add("tokenizer.json", 2, b"x")
    with pytest.raises(SluiceError, match="shorter than announced"):
        incoming.add("config.json", 1, b"x")
    incoming = store.receive("0" * 64)
    incoming.add("tokenizer.json", 1, b"x")
    incoming.add("config.json", 1, b"x")
    with pytest.raises(SluiceError, match="not allowed"):
        incoming.add("tokenizer.json", 1, b"x")  # a file that was complete already


def test_size_and_number_of_files_are_bounded(store: TokenizerStore) -> None:
    incoming = store.receive("0" * 64)
    with pytest.raises(SluiceError, match="larger than"):
        incoming.add("tokenizer.json", tokenizer_store.MAX_BYTES + 1, b"")
    incoming = store.receive("0" * 64)
    for index in range(tokenizer_store.MAX_FILES):
        incoming.add(f"additional_chat_templates/{index}.jinja", 0, b"")
    with pytest.raises(SluiceError, match="more than 64 files"):
        incoming.add("tokenizer.json", 0, b"")


@pytest.mark.parametrize("wanted", ["", "abc", "../" + "0" * 61, "G" * 64])
def test_what_is_no_fingerprint_is_neither_found_nor_received(store: TokenizerStore, wanted: str) -> None:
    assert store.find(wanted) is None
    with pytest.raises(SluiceError, match="no valid fingerprint"):
        store.receive(wanted)


def test_an_empty_tokenizer_is_refused(store: TokenizerStore) -> None:
    with pytest.raises(SluiceError, match="does not match"):
        store.receive("0" * 64).keep()


def test_what_others_left_behind_is_removed_when_it_is_old(store: TokenizerStore, tmp_path: Path) -> None:
    store.receive("0" * 64)
    old, young = store.receive("0" * 64), store.receive("0" * 64)
    past = time.time() - tokenizer_store.ABANDONED_S - 1
    os.utime(old._folder, (past, past))
    store.receive("0" * 64)
    assert not old._folder.exists()
    assert young._folder.exists()


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_error(match="cannot be stored", kind=ErrorKind.FAILED_PRECONDITION):
        TokenizerStore(tmp_path / "file" / "cache").receive("0" * 64)
