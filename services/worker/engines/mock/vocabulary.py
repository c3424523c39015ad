"""Encodes and decodes the mock engine's text with the model's tokenizer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from services.common.base.errors import SluiceError, invalid
from services.common.packages import model_files as models


class MockVocabulary(ABC):
    """A tokenizer without its chat template.

    Attributes:
        size: Upper bound of the ids, exclusive.
        special_ids: Control ids, which plain text never encodes to.
        eos_ids: End-of-sequence ids, the default one first; may be empty.
    """

    size: int
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special ones; incomplete characters become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text, without special ids."""
        return [token_id for token_id in self._encode(text) if token_id not in self.special_ids]

    def encode_marked(self, text: str) -> list[int]:
        """Returns the ids of text; the names of special tokens in it become special ids."""
        names = self.special_names
        if not names:
            return self.encode(text)
        parts = self._split_at_names(text)
        return [token_id for part in parts for token_id in ([names[part]] if part in names else self.encode(part))]

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Special token ids by their text."""
        return {}

    @cached_property
    def _split_at_names(self) -> Callable[[str], list[str | Any]]:
        names = sorted(self.special_names, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")").split


class _Mistral(MockVocabulary):
    def __init__(self, path: Path) -> None:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        from mistral_common.tokens.tokenizers.tekken import is_tekkenizer

        self._tokenizer = MistralTokenizer.from_file(str(_mistral_file(path))).instruct_tokenizer.tokenizer
        self.size = self._tokenizer.n_words
        self.special_ids = frozenset(self._tokenizer.special_ids)
        self.eos_ids = (self._tokenizer.eos_id,)
        self._piece: Callable[[int], bytes] | None = None
        self._ids: Callable[[str], list[int]] | None = None
        self._offset = 0
        if is_tekkenizer(self._tokenizer):
            self._piece = lru_cache(maxsize=self.size)(self._tokenizer.id_to_byte_piece)
            self._ids, self._offset = self._tokenizer._model.encode, self._tokenizer.num_special_tokens

    @cached_property
    def special_names(self) -> dict[str, int]:
        """See MockVocabulary."""
        return {self._tokenizer.id_to_piece(token_id): token_id for token_id in self.special_ids}

    def _encode(self, text: str) -> list[int]:
        if self._ids is None:
            return self._tokenizer.encode(text, bos=False, eos=False)
        offset = self._offset  # which the library asks for once for each token
        return [offset + token_id for token_id in self._ids(text)]

    def decode(self, ids: Sequence[int]) -> str:
        if self._piece is None:
            return self._tokenizer.decode(list(ids))
        # As the library decodes: the text between special ids separately, so that no character spans one of them.
        runs = groupby(ids, self.special_ids.__contains__)
        return "".join(b"".join(map(self._piece, run)).decode(errors="replace") for special, run in runs if not special)


class _HuggingFace(MockVocabulary):
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path if path.is_file() else path / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.size = max(highest + 1, _declared_size(path))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_ids = _declared_eos(path, self._tokenizer)

    @cached_property
    def special_names(self) -> dict[str, int]:
        """See MockVocabulary."""
        return {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load_vocabulary(path: Path, processor: str) -> MockVocabulary:
    """Loads the tokenizer at `path`; slow, so call it off the event loop.

    Raises:
        SluiceError: INVALID_ARGUMENT when the files are invalid.
    """
    try:
        return _Mistral(path) if processor == "mistral" else _HuggingFace(path)
    except SluiceError:
        raise
    except Exception as error:  # the tokenizer libraries raise many unrelated types
        raise invalid(f"The tokenizer at {path} cannot be loaded: {error}.", param="model") from error


def declared_context_length(path: Path) -> int:
    """Returns the context length from the model's config.json; 0 if not set."""
    config = models.read_json(path, "config.json")
    for section in (config, config.get("text_config")):
        length = section.get("max_position_embeddings") if isinstance(section, dict) else None
        if isinstance(length, int) and length > 0:
            return length
    return 0


def _mistral_file(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = [path / "tekken.json", *sorted(path.glob("tokenizer.model.v*"))]
    return next((file for file in candidates if file.is_file()), candidates[0])


def _declared_size(path: Path) -> int:
    size = models.read_json(path, "config.json").get("vocab_size")
    return size if isinstance(size, int) else 0


def _declared_eos(path: Path, tokenizer: Any) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        declared = models.read_json(path, name).get("eos_token_id")
        ids = declared if isinstance(declared, list) else [declared]
        if eos_ids := tuple(token_id for token_id in ids if isinstance(token_id, int)):
            return eos_ids
    token = models.read_json(path, "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return () if token_id is None else (token_id,)
