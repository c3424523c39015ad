"""Bytes of single tokens, for callers that show logprobs; recorded only on request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.postprocess.detokenize.detokenizer import Detokenizer
from services.postprocess.detokenize.vocabulary import Vocabulary


@dataclass(slots=True)
class TokenTexts:
    """Tokens in order: the length of each in bytes of `pieces`, and its offset in the text in code points."""

    lengths: array[int] = field(default_factory=lambda: array("I"))
    pieces: bytearray = field(default_factory=bytearray)
    offsets: array[int] = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, piece: bytes, offset: int) -> None:
        """Appends a token."""
        self.lengths.append(len(piece))
        self.pieces += piece
        self.offsets.append(offset)

    def without(self, count: int) -> TokenTexts:
        """Returns a copy without the first `count` tokens."""
        return TokenTexts(self.lengths[count:], self.pieces[sum(self.lengths[:count]) :], self.offsets[count:])


class TokenRecorder:
    """A detokenizer that records the bytes of each token.

    Args:
        inner: produces the stream's text.
        vocabulary: of the model.

    Attributes:
        known: number of tokens to omit because the caller has received them.
    """

    __slots__ = ("_inner", "_offset", "_piece", "_recorded", "flush", "known")

    def __init__(self, inner: Detokenizer, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._piece = vocabulary.piece
        self._offset = 0
        self._recorded = TokenTexts()
        self.flush = inner.flush
        self.known = 0

    def note(self, token: int) -> None:
        """Records a token without text, such as the one that ends the stream; an unknown id has no bytes."""
        self._recorded.add(self._piece(token) or b"", self._offset)

    def step(self, token: int) -> str:
        text = self._inner.step(token)
        self.note(token)
        self._offset += len(text)
        return text

    def peek(self, tokens: Sequence[int]) -> str | None:
        """Returns None: every token is recorded."""
        return None

    def take(self) -> TokenTexts:
        """Returns the tokens recorded since the last call."""
        recorded = self._recorded
        if recorded:
            self._recorded = TokenTexts()
        if not self.known:
            return recorded
        known = min(self.known, len(recorded))
        self.known -= known
        return recorded.without(known)
