"""Vocabularies from tokenizer.json files.

Two families of decoders are byte tables: byte-level (GPT-2, Llama 3, Qwen) and SentencePiece conversions (Llama 2,
Mistral, Gemma, T5). A table is used only if it produces the library's text for samples of the vocabulary; all other
decoders use the library.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import read_json
from services.postprocess.detokenize.detokenizer import EACH_BYTE, ByteTable, TableDetokenizer, fallback_byte
from services.postprocess.detokenize.vocabulary import LibraryVocabulary, TableVocabulary, Vocabulary

log = logging.getLogger(__name__)

SAMPLES = 256
SAMPLE_LENGTH = 8
MAX_PADDED = 1 << 20
"""Ids of a vocabulary padded by `config.json`, or twice those of the tokenizer if more; a larger size is ignored."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Converts a token to bytes as a decoder section specifies; `opening` does so for the first token of a text."""

    token_bytes: Callable[[str], bytes]
    errors: str
    opening: Callable[[str], bytes] | None = None


def load(path: Path) -> Vocabulary:
    """Loads a vocabulary from tokenizer.json, or from the folder that contains it."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise SluiceError(ErrorKind.NOT_FOUND, f"{path} contains no tokenizer.json.", param="model")
    text = file.read_text("utf-8")
    tokenizer = Tokenizer.from_str(text)
    size = _size(tokenizer)
    size = max(size, _padded_size(path, size))
    decoding = _decoding(json.loads(text).get("decoder"))
    if decoding is None:
        return LibraryVocabulary(tokenizer, size)
    table = _table(tokenizer, size, decoding)
    if not _proven(table, tokenizer):
        log.warning("the table of this tokenizer differs from its library; using the library, which is slower")
        return LibraryVocabulary(tokenizer, size)
    specials = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return TableVocabulary(table, frozenset(specials))


def _size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _padded_size(path: Path, known: int) -> int:
    """Returns the padded vocabulary size of the model; it may generate padding ids, which have no text.

    Sizes far beyond the number of tokens are ignored, because a table has an entry for each id.
    """
    config = read_json(path, "config.json")
    text_config = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, text_config) if isinstance(part, dict)]
    most = max(MAX_PADDED, 2 * known)
    return max((size for size in sizes if isinstance(size, int) and size <= most), default=0)


def _table(tokenizer: Tokenizer, size: int, decoding: Decoding) -> ByteTable:
    tokens = [tokenizer.id_to_token(token) or "" for token in range(size)]
    pieces = [decoding.token_bytes(token) for token in tokens]
    first = decoding.opening
    opening = None if first is None else lambda token: first(tokens[token])
    return ByteTable.of(pieces, decoding.errors, opening=opening)


def _proven(table: ByteTable, tokenizer: Tokenizer) -> bool:
    """Returns whether the table produces the library's text for random sequences of complete UTF-8 pieces."""
    draw = random.Random(len(table.texts))
    complete = [token for token, text in enumerate(table.texts) if text]
    for _ in range(SAMPLES if complete else 0):
        ids = draw.choices(complete, k=SAMPLE_LENGTH)
        detokenizer = TableDetokenizer(table)
        if "".join(map(detokenizer.step, ids)) != tokenizer.decode(ids, skip_special_tokens=False):
            return False
    return True


def _decoding(decoder: Any) -> Decoding | None:
    """Returns the byte table decoding of a decoder section; None if it has none."""
    steps = _flat(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return Decoding(_byte_level, "replace")
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        return _byte_fallback(steps[0], steps[3:])
    return None


def _flat(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder.get("decoders", []) for step in _flat(part)]


def _byte_alphabet() -> dict[str, int]:
    """Returns the bytes by the printable characters that represent them in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # an added token with characters outside the alphabet is plain text
        return token.encode()


def _metaspace(step: dict[str, Any]) -> Decoding:
    mark = step.get("replacement", "▁")
    opening = None if step.get("prepend_scheme") == "never" else lambda token: token.replace(mark, "").encode()
    return Decoding(lambda token: token.replace(mark, " ").encode(), "replace", opening)


def _byte_fallback(replace: dict[str, Any], rest: list[dict[str, Any]]) -> Decoding | None:
    mark, content = replace.get("pattern", {}).get("String"), replace.get("content", "")
    if not mark:
        return None

    def token_bytes(token: str) -> bytes:
        token = token.replace(mark, content)
        return fallback_byte(token) or token.encode()

    if not rest:
        return Decoding(token_bytes, EACH_BYTE)
    if len(rest) == 1 and rest[0] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
        return Decoding(token_bytes, EACH_BYTE, lambda token: token_bytes(token).removeprefix(b" "))
    return None
