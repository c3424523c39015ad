"""Models are loaded once, off the event loop, and failures are sentences."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.common.models import DEFAULT_SOURCE, ModelSpec
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.registry import Registry
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry, load
from tests.support.data.tiny_models import build_tiny_model
from tests.support.data.vocabularies import byte_level

SPECS = [ModelSpec("m", "anywhere")]


async def test_many_callers_load_once_and_not_on_the_loop() -> None:
    threads = []

    def loader(spec: ModelSpec) -> Vocabulary:
        threads.append(threading.current_thread())
        return byte_level().vocabulary

    library = VocabularyRegistry(SPECS, 30, loader)
    assert library.ready("m") is None
    found = await asyncio.gather(*(library.get("m") for _ in range(10)))
    assert set(map(id, found)) == {id(library.ready("m"))}
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_failed_load_is_tried_again() -> None:
    outcomes: list[Exception | None] = [SluiceError(ErrorKind.NOT_FOUND, "No."), ValueError("secret"), None]

    def loader(spec: ModelSpec) -> Vocabulary:
        if failure := outcomes.pop(0):
            raise failure
        return byte_level().vocabulary

    library = VocabularyRegistry(SPECS, 30, loader)
    with pytest.raises(SluiceError, match="No"):
        await library.get("m")
    with pytest.raises(SluiceError, match="cannot be loaded") as caught:
        await library.get("m")
    assert "secret" not in caught.value.message
    assert await library.get("m") is byte_level().vocabulary


async def test_nobody_waits_longer_than_the_limit() -> None:
    gate = threading.Event()

    def loader(spec: ModelSpec) -> Vocabulary:
        gate.wait(30)
        return byte_level().vocabulary

    library = VocabularyRegistry(SPECS, 0.01, loader)
    with pytest.raises(SluiceError, match="did not load") as caught:
        await library.get("m")
    assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
    gate.set()
    await library.close()


async def test_an_unknown_model_is_answered_with_those_that_are_known() -> None:
    library = VocabularyRegistry([ModelSpec("b", "x"), ModelSpec("a", "y")], 30)
    with pytest.raises(SluiceError, match="available: a, b") as caught:
        await library.get("c")
    assert (caught.value.kind, caught.value.code) == (ErrorKind.NOT_FOUND, "model_not_found")


def test_a_rounded_up_vocabulary_has_ids_without_text(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    real = load(ModelSpec("m", str(folder))).size
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": real + 100}))
    vocabulary = load(ModelSpec("m", str(folder)))
    assert vocabulary.size == real + 100
    assert vocabulary.detokenizer(True).step(real + 99) == ""


def test_an_implementation_of_the_user_s_own_has_the_files_text(tmp_path: Path) -> None:
    assert load(ModelSpec("m", str(build_tiny_model(tmp_path)), "my.package:Tokenizer")).exact


def test_broken_and_missing_tokenizers_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SluiceError, match="tokenizer of m cannot be read") as caught:
        load(ModelSpec("m", str(tmp_path)))
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    (tmp_path / "tokenizer.json").unlink()
    for processor in ("", "hf", "mistral"):
        with pytest.raises(SluiceError, match="contains no"):
            load(ModelSpec("m", str(tmp_path), processor))
    with pytest.raises(SluiceError, match="does not exist"):
        load(ModelSpec("m", str(tmp_path / "nowhere")))


@pytest.mark.parametrize("models", [["a=x", "a=y"], ["a="], ["a=x@nothing"], []])
def test_bad_models_are_refused_at_the_start(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        PostprocessSettings.load(["--models", ",".join(models)])
    assert caught.value.code == 2
    assert "--models" in capsys.readouterr().err


def test_the_default_model_needs_no_network() -> None:
    assert [str(spec) for spec in PostprocessSettings.load([]).served] == ["tekken=mistral-common:tekken_240911"]


async def test_the_cards_parsers_count_unless_the_operator_says_otherwise() -> None:
    registry = Registry()
    library = VocabularyRegistry(
        [], 30, lambda spec: byte_level().vocabulary, parsers={"b": ParserNames("granite")}, check=registry.check
    )
    for name in ("a", "b"):
        await library.add(ModelSpec(name, DEFAULT_SOURCE, tool_parser="hermes", reasoning_parser="think"))
        names = (await library.get(name)).parsers
        assert names == ParserNames("hermes" if name == "a" else "granite", "think")


async def test_a_card_that_names_a_parser_nobody_has_is_not_served() -> None:
    library = VocabularyRegistry([], 30, lambda spec: byte_level().vocabulary, check=Registry().check)
    with pytest.raises(SluiceError, match="similar names: hermes"):
        await library.add(ModelSpec("a", DEFAULT_SOURCE, tool_parser="hermess"))
    with pytest.raises(SluiceError, match="--native-parsers vllm"):
        await library.add(ModelSpec("a", DEFAULT_SOURCE, tool_parser="vllm:hermes", reasoning_parser="vllm:qwen3"))
