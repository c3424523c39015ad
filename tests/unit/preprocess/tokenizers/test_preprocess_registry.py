from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import ModelSpec
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from tests.support.data.loaded_tokenizers import limits, tiny_folder, tiny_hf
from tests.support.oracles.errors import raises_error
from tests.support.repository import ROOT
from tests.support.waiting import until

SPECS = [ModelSpec("b", "B"), ModelSpec("a", "A")]


class Loader:
    """Loads when told to, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        self.fail = False

    def begun(self, loads: int) -> None:
        """Waits until so many loads are under way."""
        while len(self.asked) < loads:
            time.sleep(0.01)

    def __call__(self, spec: ModelSpec) -> TokenizerProtocol:
        self.asked.append(spec.name)
        assert self.go.wait(30)
        if self.fail:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "broken")
        return tiny_hf()


async def test_an_unknown_model_is_not_found_and_the_others_are_listed() -> None:
    with pytest.raises(SluiceError, match="this server has a, b") as caught:
        await ModelRegistry(SPECS, Loader()).get("c")
    error = caught.value
    assert (error.kind, error.code, error.param) == (ErrorKind.NOT_FOUND, "model_not_found", "model")


async def test_many_callers_share_one_load() -> None:
    loader = Loader()
    registry = ModelRegistry(SPECS, loader)
    callers = [asyncio.create_task(registry.get("a")) for _ in range(20)]
    await asyncio.sleep(0)
    callers[0].cancel()  # one that leaves does not end the load of the others
    loader.go.set()
    tokenizers = await asyncio.gather(*callers[1:])
    assert loader.asked == ["a"]
    assert all(tokenizer is tokenizers[0] for tokenizer in tokenizers)
    assert await registry.get("a") is tokenizers[0]
    assert [(spec.name, tokenizer is not None) for spec, tokenizer in registry] == [("a", True), ("b", False)]


async def test_callers_who_wait_until_a_model_is_learned_get_what_was_loaded_then() -> None:
    loader = Loader()
    learned = asyncio.Event()

    async def learn(name: str, timeout_s: float) -> bool:
        return await learned.wait()

    registry = ModelRegistry([], loader, learn=learn)
    callers = [asyncio.create_task(registry.get("a")) for _ in range(3)]
    await asyncio.sleep(0)
    loader.go.set()
    await registry.add(ModelSpec("a", "A"))
    learned.set()
    tokenizers = await asyncio.gather(*callers)
    assert loader.asked == ["a"], "a second one would take seconds, and leave the first one's process behind"
    assert all(tokenizer is tokenizers[0] for tokenizer in tokenizers)


async def test_discovered_models_with_the_same_files_and_template_share_a_tokenizer() -> None:
    loaded: list[str] = []
    closed: list[str] = []

    class Closable:
        def __init__(self, name: str) -> None:
            self.name, self.facts = name, tiny_hf().facts

        def __getattr__(self, name: str) -> object:
            return getattr(tiny_hf(), name)

        def close(self) -> None:
            closed.append(self.name)

    def load(spec: ModelSpec) -> TokenizerProtocol:
        loaded.append(spec.name)
        return cast("TokenizerProtocol", Closable(spec.name))

    registry = ModelRegistry([ModelSpec("own", "S")], load)
    names = [f"m{number}" for number in range(32)]
    await asyncio.gather(*(registry.add(ModelSpec(name, "S", learned=True)) for name in names[:16]))
    for name in names[16:]:
        await registry.add(ModelSpec(name, "S", learned=True))
    await registry.add(ModelSpec("other", "S", chat_template="{{ messages }}", learned=True))
    assert len(loaded) == 2
    assert len({id(await registry.get(name)) for name in names}) == 1
    assert await registry.get("other") is not await registry.get("m0")
    assert await registry.get("own") is not await registry.get("m0")
    for name in names[:-1]:
        registry.remove(name)
    await asyncio.sleep(0.05)
    assert not closed
    registry.remove(names[-1])
    await until(lambda: closed == [loaded[0]])
    await registry.close()
    assert sorted(closed) == sorted(loaded)


async def test_preload_loads_all() -> None:
    loader = Loader()
    loader.go.set()
    registry = ModelRegistry(SPECS, loader)
    await registry.preload()
    assert sorted(loader.asked) == ["a", "b"]
    assert all(tokenizer is not None for _, tokenizer in registry)


async def test_a_failed_load_is_an_error_and_tried_again() -> None:
    loader = Loader()
    loader.fail = True
    loader.go.set()
    registry = ModelRegistry(SPECS, loader)
    with pytest.raises(SluiceError, match="broken"):
        await registry.get("a")
    with pytest.raises(SluiceError, match="broken"):
        await registry.preload()
    await until(lambda: not registry._loading)  # the error is that of the first, the second may still be loading
    loader.fail = False
    assert await registry.get("a") is tiny_hf()


async def test_a_caller_waits_only_so_long_for_a_load() -> None:
    loader = Loader()
    registry = ModelRegistry(SPECS, loader, wait_s=0.01)
    with raises_error(match="still loading", kind=ErrorKind.UNAVAILABLE):
        await registry.get("a")
    loader.go.set()
    await registry.preload()
    assert await registry.get("a") is tiny_hf()


async def test_closing_gives_up_what_is_loading() -> None:
    loader = Loader()
    registry = ModelRegistry(SPECS, loader)
    caller = asyncio.create_task(registry.get("a"))
    await asyncio.sleep(0)
    await registry.close()
    with pytest.raises(asyncio.CancelledError):
        await caller
    loader.go.set()


async def test_what_is_loading_does_not_hold_up_the_end_of_the_process() -> None:
    loader = Loader()
    registry = ModelRegistry(SPECS, loader)
    loads = [asyncio.create_task(registry.get("a")), asyncio.create_task(registry.add(ModelSpec("new", "N")))]
    await asyncio.sleep(0)
    await asyncio.to_thread(loader.begun, 2)
    for load in loads:
        load.cancel()
    await registry.close()
    try:
        async with asyncio.timeout(5):
            await asyncio.get_running_loop().shutdown_default_executor()  # as asyncio.run does at its end
    finally:
        loader.go.set()


@pytest.mark.parametrize(
    ("processor", "content", "kind"),
    [
        ("hf", "{}", ErrorKind.FAILED_PRECONDITION),
        ("hf", "no json", ErrorKind.FAILED_PRECONDITION),
        ("mistral", "{}", ErrorKind.INVALID_ARGUMENT),
        ("no.such.module:Class", "{}", ErrorKind.FAILED_PRECONDITION),
        ("unheard-of", "{}", ErrorKind.INVALID_ARGUMENT),
    ],
)
def test_files_that_cannot_be_loaded_are_one_sentence(
    tmp_path: Path, processor: str, content: str, kind: ErrorKind
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with raises_error(kind=kind) as caught:
        load_tokenizer(ModelSpec("m", str(tmp_path), processor), limits())
    assert "\n" not in caught.value.message


def test_a_missing_folder_is_not_found() -> None:
    with raises_error(match="does not exist", kind=ErrorKind.NOT_FOUND):
        load_tokenizer(ModelSpec("m", "./nowhere"), limits())


def test_a_chat_template_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!")
    spec = ModelSpec("tiny", str(tiny_folder()))
    loaded = load_tokenizer(spec, limits(), template_file=file)
    assert loaded.render(ChatRequest([{"role": "user", "content": "hi"}])) == "hi!"
    assert loaded.facts.template_fingerprint != load_tokenizer(spec, limits()).facts.template_fingerprint
    with pytest.raises(SluiceError, match="does not support chat templates"):
        load_tokenizer(ModelSpec.parse("mistral-common:tekken_240911"), limits(), template_file=file)
    with raises_error(match="cannot be loaded", kind=ErrorKind.FAILED_PRECONDITION):
        load_tokenizer(spec, limits(), template_file=tmp_path / "none.jinja")


DOCUMENT = ROOT / "docs" / "preprocessing.md"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizerProtocol:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    (tmp_path / "byte_tokenizer.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "byte_tokenizer", raising=False)
    return load_tokenizer(ModelSpec("mine", str(tiny_folder()), "byte_tokenizer:ByteTokenizer"), limits())
