"""What single tokens stand for, for callers that show logprobs: told only to those who ask."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.postprocess.detokenize.detokenizer import Detokenizer
from services.postprocess.detokenize.vocabulary import Vocabulary


@dataclass(slots=True)
class TokenTexts:
    """Tokens in order: `lengths` bytes of `pieces` each, and where in the text each stands, in code points."""

    lengths: array[int] = field(default_factory=lambda: array("I"))
    pieces: bytearray = field(default_factory=bytearray)
    offsets: array[int] = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, piece: bytes, offset: int) -> None:
        """One more token."""
        self.lengths.append(len(piece))
        self.pieces += piece
        self.offsets.append(offset)

    def without(self, count: int) -> TokenTexts:
        """The same without its first tokens."""
        return TokenTexts(self.lengths[count:], self.pieces[sum(self.lengths[:count]) :], self.offsets[count:])


class TokenRecorder:
    """A detokenizer that remembers what each token stands for.

    Args:
        inner: makes the stream's text.
        vocabulary: of the model.

    Attributes:
        known: tokens that the caller has been told of already.
    """

    __slots__ = ("_inner", "_news", "_offset", "_piece", "flush", "known")

    def __init__(self, inner: Detokenizer, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._piece = vocabulary.piece
        self._offset = 0
        self._news = TokenTexts()
        self.flush = inner.flush
        self.known = 0

    def note(self, token: int) -> None:
        """A token that adds no text, such as the one that ends the stream; an unknown one has no bytes."""
        self._news.add(self._piece(token) or b"", self._offset)

    def step(self, token: int) -> str:
        """See Detokenizer."""
        text = self._inner.step(token)
        self.note(token)
        self._offset += len(text)
        return text

    def take(self) -> TokenTexts:
        """The tokens since the last time."""
        news = self._news
        if news:
            self._news = TokenTexts()
        if not self.known:
            return news
        known = min(self.known, len(news))
        self.known -= known
        return news.without(known)
