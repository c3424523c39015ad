"""Vocabularies of models, which create detokenizers."""

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
    """Vocabulary of one model.

    Attributes:
        size: upper bound of the ids.
        exact: detokenization is a table lookup, verified against the library.
        parsers: parsers that `auto` selects for this model.
        files_parsers: parsers that the files alone select.
        replaces_engine: the built-in parsers stand in for those of an engine.
        built_in: fallback if `auto` selected parsers of an engine that cannot handle this model; None if parsers are
            configured explicitly.
        source: location of its files.
        template: its chat template; empty for none.
    """

    size: int
    exact: bool
    parsers: ParserNames = ParserNames()
    built_in: ParserNames | None = None
    replaces_engine: bool = False
    files_parsers: ParserNames = ParserNames()
    source: str = ""
    template: str = ""

    @property
    @abstractmethod
    def special_tokens(self) -> frozenset[str]:
        """Texts of all special tokens."""

    @abstractmethod
    def detokenizer(
        self, skip_special_tokens: bool, tail: Sequence[int] = (), markers: frozenset[str] = NO_MARKERS
    ) -> Detokenizer:
        """Returns a detokenizer for a stream whose prompt ended with `tail`; it keeps special tokens in `markers`."""

    @abstractmethod
    def piece(self, token: int) -> bytes | None:
        """Returns the bytes of an id, also of special tokens; None for an id outside the vocabulary."""

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the bytes of several ids; raises SluiceError (INVALID_ARGUMENT) for an unknown one."""
        found = []
        for token in tokens:
            piece = self.piece(token)
            if piece is None:
                raise outside_vocabulary(token, self.size)
            found.append(piece)
        return found

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of a few tokens, including special ones."""
        detokenizer = self.detokenizer(False)
        if (text := detokenizer.peek(tokens)) is not None:
            return text
        return "".join(map(detokenizer.step, tokens)) + detokenizer.flush()


class TableVocabulary(Vocabulary):
    """A vocabulary in which each id has fixed bytes.

    Args:
        kept: the table including the text of special ids.
        specials: ids that skip_special_tokens omits.
        specials_break: a special id ends an incomplete character even if it is omitted.
    """

    exact = True

    def __init__(self, kept: ByteTable, specials: frozenset[int], specials_break: bool = False) -> None:
        self.size = len(kept.pieces)
        self._kept = kept
        self._specials = {token: kept.pieces[token].decode(errors="replace") for token in specials}
        self._special_tokens = frozenset(self._specials.values())
        self._specials_break = specials_break
        self._skipped = self._without(NO_MARKERS)
        self._skipped_but: dict[frozenset[str], ByteTable] = {NO_MARKERS: self._skipped}

    @property
    def special_tokens(self) -> frozenset[str]:
        return self._special_tokens

    def piece(self, token: int) -> bytes | None:
        return self._kept.pieces[token] if token < self.size else None

    def _without(self, markers: frozenset[str]) -> ByteTable:
        skipped = frozenset(token for token, text in self._specials.items() if text not in markers)
        return self._kept.without(skipped, skipped if self._specials_break else frozenset())

    def detokenizer(
        self, skip_special_tokens: bool, tail: Sequence[int] = (), markers: frozenset[str] = NO_MARKERS
    ) -> Detokenizer:
        if not skip_special_tokens:
            return TableDetokenizer(self._kept, tail)
        if not markers:
            return TableDetokenizer(self._skipped, tail)
        present = markers & self._special_tokens
        table = self._skipped_but.get(present)
        if table is None:  # at most as many tables as parsers
            table = self._skipped_but[present] = self._without(present)
        return TableDetokenizer(table, tail)


class LibraryVocabulary(Vocabulary):
    """A vocabulary that is decoded by its library."""

    exact = False

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._specials = {token: entry.content for token, entry in added.items() if entry.special}

    @property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self._specials.values())

    def piece(self, token: int) -> bytes | None:
        if token >= self.size:
            return None
        name = self._tokenizer.id_to_token(token) or ""
        return fallback_byte(name) or self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def detokenizer(
        self, skip_special_tokens: bool, tail: Sequence[int] = (), markers: frozenset[str] = NO_MARKERS
    ) -> Detokenizer:
        library = LibraryDetokenizer(self._tokenizer, self.size, skip_special_tokens, tail)
        kept = {token: text for token, text in self._specials.items() if text in markers}
        return MarkerDetokenizer(library, kept) if skip_special_tokens and kept else library
