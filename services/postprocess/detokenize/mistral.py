"""Vocabularies of mistral-common: Tekken, and SentencePiece if that package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.postprocess.detokenize.detokenizer import EACH_BYTE, ByteTable, fallback_byte
from services.postprocess.detokenize.vocabulary import TableVocabulary, Vocabulary

SAMPLES = 512


def load(path: Path) -> Vocabulary:
    """Loads a vocabulary from tekken.json or tokenizer.model.vN, or from the folder that contains one."""
    file = _file(path)
    return _tekken(file) if file.suffix == ".json" else _sentencepiece(file)


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / "tekken.json", *sorted(path.glob("tokenizer.model.v*"), reverse=True), path / "tokenizer.model"]
    for file in found:
        if file.is_file():
            return file
    raise SluiceError(
        ErrorKind.NOT_FOUND, f"{path} contains no tokenizer of mistral-common, such as tekken.json.", param="model"
    )


def _tekken(file: Path) -> Vocabulary:
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tekken = Tekkenizer.from_file(file)
    piece, keep = tekken.id_to_byte_piece, SpecialTokenPolicy.KEEP
    kept = ByteTable.of([piece(token, keep) for token in range(tekken.n_words)])
    # mistral-common decodes the text between special ids separately, so a character never spans a special id.
    vocabulary = TableVocabulary(kept, frozenset(tekken.special_ids), specials_break=True)
    _prove(vocabulary, range(vocabulary.size), tekken.decode, file)
    return vocabulary


def _prove(vocabulary: Vocabulary, tokens: Sequence[int], decode: Callable[[list[int]], str], file: Path) -> None:
    """Compares a sample of tokens with the library; raises SluiceError (INTERNAL) if the texts differ."""
    sample = list(tokens[:: max(1, len(tokens) // SAMPLES)])
    detokenizer = vocabulary.detokenizer(skip_special_tokens=True)
    if "".join(map(detokenizer.step, sample)) + detokenizer.flush() != decode(sample):
        raise internal(
            f"The byte table of {file.name} decodes differently from its library; report this tokenizer as a bug."
        )


def _sentencepiece(file: Path) -> Vocabulary:
    try:
        sentencepiece = importlib.import_module("sentencepiece")
    except ImportError:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"{file.name} is a SentencePiece tokenizer; install mistral-common[sentencepiece].",
            param="model",
            code="extra_missing",
        ) from None
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    size = processor.vocab_size()
    pieces = [_sentencepiece_bytes(processor, token) for token in range(size)]

    def opening(token: int) -> bytes:
        return pieces[token] if processor.is_unknown(token) else pieces[token].removeprefix(b" ")

    table = ByteTable.of(pieces, EACH_BYTE, opening=opening)
    vocabulary = TableVocabulary(table, frozenset(token for token in range(size) if processor.is_control(token)))
    _prove(vocabulary, [token for token in range(size) if not processor.is_byte(token)], processor.decode, file)
    return vocabulary


def _sentencepiece_bytes(processor: Any, token: int) -> bytes:
    piece: str = processor.id_to_piece(token)
    if processor.is_byte(token):
        return fallback_byte(piece)
    if processor.is_unknown(token):
        surface: str = processor.decode([token])
        return surface.encode()
    return piece.replace("▁", " ").encode()
