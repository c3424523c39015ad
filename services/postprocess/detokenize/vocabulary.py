"""A model's vocabulary as postprocess needs it: what makes detokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from services.postprocess.detokenize.detokenizer import (
    ByteTable,
    Detokenizer,
    LibraryDetokenizer,
    MarkerDetokenizer,
    TableDetokenizer,
    fallback_byte,
    outside_vocabulary,
)

NO_MARKERS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The parsers of a model or a stream; empty for none."""

    tool: str = ""
    reasoning: str = ""


class Vocabulary(ABC):
    """The ids of one model.

    Attributes:
        size: ids are below this.
        exact: detokenizing is a table look-up, proven equal to the library's decoding.
        parsers: what the parser name `auto` means for this model.
        built_in: what it means if an engine's own, which nobody asked for by name, cannot work with this model; None
            where somebody did.
        source: where its files are.
        template: its chat template; empty for none.
    """

    size: int
    exact: bool
    parsers: ParserNames = ParserNames()
    built_in: ParserNames | None = None
    source: str = ""
    template: str = ""

    @property
    @abstractmethod
    def special_tokens(self) -> frozenset[str]:
        """The texts of all special tokens."""

    @abstractmethod
    def detokenizer(
        self, skip_special_tokens: bool, tail: Sequence[int] = (), markers: frozenset[str] = NO_MARKERS
    ) -> Detokenizer:
        """A detokenizer for one stream whose prompt ended with `tail`; special tokens among `markers` stay."""

    @abstractmethod
    def piece(self, token: int) -> bytes | None:
        """The bytes that an id stands for by itself, special ones spelled out; None outside the vocabulary."""

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The same for several ids; SluiceError(INVALID_ARGUMENT) for one that is unknown."""
        found = []
        for token in tokens:
            piece = self.piece(token)
            if piece is None:
                raise outside_vocabulary(token, self.size)
            found.append(piece)
        return found

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens, special ones included."""
        detokenizer = self.detokenizer(False)
        return "".join(map(detokenizer.step, tokens)) + detokenizer.flush()


class TableVocabulary(Vocabulary):
    """A vocabulary whose ids have bytes of their own.

    Args:
        kept: the table with the text of special ids.
        specials: ids that skip_special_tokens leaves out.
        specials_break: a special id ends a character under way even where it is left out.
    """

    exact = True

    def __init__(self, kept: ByteTable, specials: frozenset[int], specials_break: bool = False) -> None:
        self.size = len(kept.pieces)
        self._kept = kept
        self._specials = {token: kept.pieces[token].decode(errors="replace") for token in specials}
        self._specials_break = specials_break
        self._skipped = self._without(NO_MARKERS)
        self._skipped_but: dict[frozenset[str], ByteTable] = {NO_MARKERS: self._skipped}

    @property
    def special_tokens(self) -> frozenset[str]:
        """See Vocabulary."""
        return frozenset(self._specials.values())

    def piece(self, token: int) -> bytes | None:
        """See Vocabulary."""
        return self._kept.pieces[token] if token < self.size else None

    def _without(self, markers: frozenset[str]) -> ByteTable:
        skipped = frozenset(token for token, text in self._specials.items() if text not in markers)
        return self._kept.without(skipped, skipped if self._specials_break else frozenset())

    def detokenizer(
        self, skip_special_tokens: bool, tail: Sequence[int] = (), markers: frozenset[str] = NO_MARKERS
    ) -> Detokenizer:
        """See Vocabulary."""
        if not skip_special_tokens:
            return TableDetokenizer(self._kept, tail)
        if not markers:
            return TableDetokenizer(self._skipped, tail)
        present = markers & self.special_tokens
        table = self._skipped_but.get(present)
        if table is None:  # as many as there are parsers
            table = self._skipped_but[present] = self._without(present)
        return TableDetokenizer(table, tail)


class LibraryVocabulary(Vocabulary):
    """A vocabulary that only its library can decode."""

    exact = False

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._specials = {token: entry.content for token, entry in added.items() if entry.special}

    @property
    def special_tokens(self) -> frozenset[str]:
        """See Vocabulary."""
        return frozenset(self._specials.values())

    def piece(self, token: int) -> bytes | None:
        """See Vocabulary."""
        if token >= self.size:
            return None
        name = self._tokenizer.id_to_token(token) or ""
        return fallback_byte(name) or self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def detokenizer(
        self, skip_special_tokens: bool, tail: Sequence[int] = (), markers: frozenset[str] = NO_MARKERS
    ) -> Detokenizer:
        """See Vocabulary."""
        library = LibraryDetokenizer(self._tokenizer, self.size, skip_special_tokens, tail)
        seen = {token: text for token, text in self._specials.items() if text in markers}
        return MarkerDetokenizer(library, seen) if skip_special_tokens and seen else library
