"""Small vocabularies of every decoder family, each beside the library's own decoding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.common.packages.model_files import DEFAULT_SOURCE, resolve
from services.postprocess.detokenize import hf, mistral
from services.postprocess.detokenize.vocabulary import Vocabulary
from tests.support.data.tiny_models import build_tiny_model

WORDS = ("▁", "▁Hello", "▁world", "▁a", "a", "b", "lo", "é", "▁é", "\n", "stop", "▁st", "op", ".")


@dataclass(frozen=True)
class Known:
    """A vocabulary and what its library says: `decode(ids, skip_special_tokens)` and `encode(text)`."""

    vocabulary: Vocabulary
    decode: Callable[[Sequence[int], bool], str]
    encode: Callable[[str], list[int]]
    specials: tuple[int, ...]


@cache
def tekken() -> Known:
    """The bundled Tekken tokenizer."""
    path = resolve(DEFAULT_SOURCE)
    library = Tekkenizer.from_file(path)

    def decode(ids: Sequence[int], skip: bool) -> str:
        return library.decode(list(ids), SpecialTokenPolicy.IGNORE if skip else SpecialTokenPolicy.KEEP)

    return Known(mistral.load(path), decode, lambda text: library.encode(text, bos=False, eos=False), (0, 1, 2, 3, 4))


@cache
def byte_level() -> Known:
    """A tiny byte-level BPE."""
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_model(Path(folder))
        return _known(hf.load(path), Tokenizer.from_file(str(path / "tokenizer.json")))


@cache
def byte_fallback() -> Known:
    """The shape of Llama 2: ▁ for spaces, bytes for what has no token, no space at the beginning of a text."""
    tokenizer = _sentencepiece_like()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _saved(tokenizer)


@cache
def metaspace() -> Known:
    """The shape of T5."""
    tokenizer = _sentencepiece_like()
    tokenizer.decoder = decoders.Metaspace()
    return _saved(tokenizer)


@cache
def word_piece() -> Known:
    """The shape of BERT, which only the library decodes."""
    words = ("[UNK]", "hello", "##ing", ",", "do", "n", "'", "t", ".", "un", "##do")
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _saved(tokenizer)


@cache
def by_library() -> Known:
    """Byte-fallback in a form that is not recognised, so that bytes go through the library."""
    tokenizer = _sentencepiece_like()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return _saved(tokenizer)


def _sentencepiece_like() -> Tokenizer:
    ids = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for word in WORDS:
        ids[word] = len(ids)
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def _saved(tokenizer: Tokenizer) -> Known:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        return _known(hf.load(Path(folder)), tokenizer)


def _known(vocabulary: Vocabulary, tokenizer: Tokenizer) -> Known:
    specials = tuple(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    return Known(
        vocabulary,
        lambda ids, skip: tokenizer.decode(list(ids), skip_special_tokens=skip),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        specials,
    )


TABLES = {"tekken": tekken, "byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
ALL = {**TABLES, "word_piece": word_piece, "by_library": by_library}
