"""Models are loaded once, off the event loop, and failures are sentences."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import DEFAULT_SOURCE, ModelSpec
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.registry import ParserRegistry
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry, load
from tests.support.data.tiny_models import build_tiny_model
from tests.support.data.vocabularies import byte_level
from tests.support.oracles.errors import raises_error

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


async def test_load_above_the_time_limit_raises_for_every_caller() -> None:
    gate = threading.Event()

    def loader(spec: ModelSpec) -> Vocabulary:
        gate.wait(30)
        return byte_level().vocabulary

    library = VocabularyRegistry(SPECS, 0.01, loader)
    with raises_error(match="did not load", kind=ErrorKind.DEADLINE_EXCEEDED):
        await library.get("m")
    gate.set()
    await library.close()


async def test_an_unknown_model_is_answered_with_those_that_are_known() -> None:
    library = VocabularyRegistry([ModelSpec("b", "x"), ModelSpec("a", "y")], 30)
    with raises_error(match="available: a, b", kind=ErrorKind.NOT_FOUND, code="model_not_found"):
        await library.get("c")


def test_a_rounded_up_vocabulary_has_ids_without_text(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    real = load(ModelSpec("m", str(folder))).size
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": real + 100}))
    vocabulary = load(ModelSpec("m", str(folder)))
    assert vocabulary.size == real + 100
    assert vocabulary.detokenizer(True).step(real + 99) == ""


def test_custom_tokenizer_has_the_text_of_its_files(tmp_path: Path) -> None:
    assert load(ModelSpec("m", str(build_tiny_model(tmp_path)), "my.package:Tokenizer")).exact


def test_broken_and_missing_tokenizers_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with raises_error(match="tokenizer of m cannot be read", kind=ErrorKind.INVALID_ARGUMENT):
        load(ModelSpec("m", str(tmp_path)))
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


async def test_parsers_of_the_card_apply_unless_configured() -> None:
    registry = ParserRegistry()
    library = VocabularyRegistry(
        [], 30, lambda spec: byte_level().vocabulary, parsers={"b": ParserNames("granite")}, check=registry.check
    )
    for name in ("a", "b"):
        await library.add(ModelSpec(name, DEFAULT_SOURCE, tool_parser="hermes", reasoning_parser="think"))
        names = (await library.get(name)).parsers
        assert names == ParserNames("hermes" if name == "a" else "granite", "think")


async def test_card_with_an_unknown_parser_is_refused() -> None:
    library = VocabularyRegistry([], 30, lambda spec: byte_level().vocabulary, check=ParserRegistry().check)
    with pytest.raises(SluiceError, match="similar names: hermes"):
        await library.add(ModelSpec("a", DEFAULT_SOURCE, tool_parser="hermess"))
    with pytest.raises(SluiceError, match="--native-parsers vllm"):
        await library.add(ModelSpec("a", DEFAULT_SOURCE, tool_parser="vllm:hermes", reasoning_parser="vllm:qwen3"))


PIECES = ("<unk>", "<s>", "</s>", "<0xE2>", "<0x82>", "<0xAC>", "▁Hello", "▁world", "!")


class Processor:
    """What SentencePiece says about a vocabulary of nine pieces."""

    def __init__(self, model_file: str, says: str = "") -> None:
        assert Path(model_file).is_file()
        self.says = says

    def vocab_size(self) -> int:
        return len(PIECES)

    def id_to_piece(self, token: int) -> str:
        return PIECES[token]

    def is_unknown(self, token: int) -> bool:
        return token == 0

    def is_control(self, token: int) -> bool:
        return token in (1, 2)

    def is_byte(self, token: int) -> bool:
        return token in (3, 4, 5)

    def decode(self, tokens: list[int]) -> str:
        text = "".join(
            " ⁇ " if token == 0 else PIECES[token].replace("▁", " ") for token in tokens if token not in (1, 2)
        )
        return self.says or (text if tokens[0] == 0 else text.removeprefix(" "))


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "tokenizer.model.v3").write_bytes(b"")
    return ModelSpec("m", str(tmp_path))


def test_sentencepiece_is_a_table_of_bytes(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Processor))
    vocabulary = load(spec)
    assert (vocabulary.exact, vocabulary.size) == (True, len(PIECES))
    detokenizer = vocabulary.detokenizer(True)
    assert [detokenizer.step(token) for token in (1, 6, 7, 3, 4, 5, 8, 0, 2)] == [
        "", "Hello", " world", "", "", "€", "!", " ⁇ ", "",
    ]  # fmt: skip
    detokenizer = vocabulary.detokenizer(False)
    assert [detokenizer.step(token) for token in (1, 6, 3, 8)] == ["<s>", " Hello", "", "\ufffd!"]
    assert vocabulary.detokenizer(True).step(0) == " ⁇ "


def test_a_table_that_the_library_contradicts_is_refused(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    contrary = SimpleNamespace(SentencePieceProcessor=lambda model_file: Processor(model_file, says="else"))
    monkeypatch.setitem(sys.modules, "sentencepiece", contrary)
    with pytest.raises(SluiceError, match="decodes differently from its library"):
        load(spec)


def test_without_the_extra_the_answer_names_it(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with raises_error(
        match=r"mistral-common\[sentencepiece\]", kind=ErrorKind.FAILED_PRECONDITION, code="extra_missing"
    ):
        load(spec)


@pytest.mark.parametrize("name", ["tekken_240718", "tekken_240911"])
def test_the_bundled_tekkens_load(name: str) -> None:
    vocabulary = load(ModelSpec("m", f"mistral-common:{name}"))
    assert (vocabulary.exact, vocabulary.size) == (True, 131_072)
