"""mistral-common's files: Tekken as bundled, SentencePiece through the same table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.common.models import ModelSpec
from services.postprocess.streams.vocabulary_registry import load

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
    with pytest.raises(SluiceError, match=r"mistral-common\[sentencepiece\]") as caught:
        load(spec)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.FAILED_PRECONDITION, "extra_missing")


@pytest.mark.parametrize("name", ["tekken_240718", "tekken_240911"])
def test_the_bundled_tekkens_load(name: str) -> None:
    vocabulary = load(ModelSpec("m", f"mistral-common:{name}"))
    assert (vocabulary.exact, vocabulary.size) == (True, 131_072)
