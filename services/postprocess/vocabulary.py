"""A model's vocabulary as postprocess needs it: what makes detokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tokenizers import Tokenizer

from services.postprocess.detokenizer import ByteTable, Detokenizer, LibraryDetokenizer, TableDetokenizer


class Vocabulary(ABC):
    """The ids of one model.

    Attributes:
        size: ids are below this.
        exact: detokenizing is a table look-up, proven equal to the library's decoding.
    """

    size: int
    exact: bool

    @abstractmethod
    def detokenizer(self, skip_special_tokens: bool, tail: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for one stream whose prompt ended with `tail`."""


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
        self._skipped = kept.without(specials, specials if specials_break else frozenset())

    def detokenizer(self, skip_special_tokens: bool, tail: Sequence[int] = ()) -> Detokenizer:
        """See Vocabulary."""
        return TableDetokenizer(self._skipped if skip_special_tokens else self._kept, tail)


class LibraryVocabulary(Vocabulary):
    """A vocabulary that only its library can decode."""

    exact = False

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self._tokenizer = tokenizer

    def detokenizer(self, skip_special_tokens: bool, tail: Sequence[int] = ()) -> Detokenizer:
        """See Vocabulary."""
        return LibraryDetokenizer(self._tokenizer, self.size, skip_special_tokens, tail)
