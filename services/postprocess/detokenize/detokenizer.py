"""Incremental detokenizing: a table of bytes with a UTF-8 decoder where that is exact, the library's stream elsewhere.

A detokenizer belongs to one stream. It gives out a character only when all its bytes are there, so a broken one never
appears early; bytes that turn out not to be UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.common.errors import SluiceError, invalid

EACH_BYTE = "sluice-replace-each-byte"
"""Codec error handler of the byte-fallback decoders: one U+FFFD for every byte that is no UTF-8, where "replace" has
one for every truncated sequence."""

TAIL_AT_MOST = 32
"""Tokens of the prompt's end that may matter; more of them are not looked at."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


def outside_vocabulary(token: int, size: int) -> SluiceError:
    """A token id that the model does not have."""
    return invalid(f"Token id {token} is outside the vocabulary of {size}.", param="token_ids", code="token_unknown")


def fallback_byte(token: str) -> bytes:
    """The byte that a token such as <0x0A> stands for; empty for all other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return b""
    return b""


class Detokenizer(Protocol):
    """One stream's way from ids to text."""

    def step(self, token: int) -> str:
        """Text that is complete with this token, often empty; SluiceError(INVALID_ARGUMENT) for an unknown id."""

    def flush(self) -> str:
        """What is held back, at the end of the stream."""


@dataclass(frozen=True, slots=True)
class ByteTable:
    """What each id stands for, one entry per id.

    Attributes:
        pieces: the bytes of every id.
        texts: the same as text, None where the bytes alone are no complete UTF-8.
        errors: codec error handler for bytes that are no UTF-8.
        breaks: ids that end a character under way although they have no bytes of their own.
        opening: bytes of an id that comes first in a text, where that makes a difference; None where it does not.
    """

    pieces: list[bytes]
    texts: list[str | None]
    errors: str = "replace"
    breaks: frozenset[int] = frozenset()
    opening: Callable[[int], bytes] | None = None

    @classmethod
    def of(
        cls,
        pieces: list[bytes],
        errors: str = "replace",
        breaks: frozenset[int] = frozenset(),
        opening: Callable[[int], bytes] | None = None,
    ) -> ByteTable:
        """Decodes every piece once."""
        return cls(pieces, [_complete(piece) for piece in pieces], errors, breaks, opening)

    def without(self, specials: frozenset[int], breaks: frozenset[int] = frozenset()) -> ByteTable:
        """The same table with the text of special ids left out."""
        pieces, texts = self.pieces.copy(), self.texts.copy()
        for token in specials:
            pieces[token], texts[token] = b"", ""
        return ByteTable(pieces, texts, self.errors, breaks, self.opening)


def _complete(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class TableDetokenizer:
    """Concatenates the bytes of ids and decodes them as UTF-8: equal to decoding all of them at once.

    Args:
        table: the vocabulary.
        tail: last ids of the prompt; a character that they began is completed, and text after them is not the
            opening of a text.
    """

    __slots__ = ("_opening", "_pending", "_pieces", "_plain", "_table", "_texts")

    def __init__(self, table: ByteTable, tail: Sequence[int] = ()) -> None:
        self._table = table
        self._texts = table.texts
        self._pieces = table.pieces
        self._pending = b""  # at most 3 bytes: the beginning of a character
        self._opening = table.opening
        self._plain = self._opening is None
        for token in tail[-TAIL_AT_MOST:]:
            self.step(token)

    def step(self, token: int) -> str:
        """See Detokenizer."""
        try:
            if self._plain:
                text = self._texts[token]
                if text is not None:
                    return text
            piece = self._pieces[token]
        except IndexError:
            raise outside_vocabulary(token, len(self._pieces)) from None
        return self._join(token, piece)

    def _join(self, token: int, piece: bytes) -> str:
        if token in self._table.breaks:
            return self.flush()
        if self._opening is not None and piece:
            piece, self._opening = self._opening(token), None
        data = self._pending + piece
        text, used = utf_8_decode(data, self._table.errors)
        self._pending = data[used:]
        self._plain = not self._pending and self._opening is None
        return text

    def flush(self) -> str:
        """See Detokenizer."""
        text = utf_8_decode(self._pending, self._table.errors, True)[0]
        self._pending = b""
        self._plain = self._opening is None
        return text


class LibraryDetokenizer:
    """The `tokenizers` library's own incremental decoder, for decoders whose text is no concatenation of pieces.

    Args:
        tokenizer: shared between streams, only read.
        size: ids are below this.
        skip_special_tokens: leave special ids out.
        tail: last ids of the prompt, for decoders that look at what came before.
    """

    HELD_AT_MOST = 32
    """Tokens without complete text before they are given out as they are: a character has four bytes at most."""

    __slots__ = ("_context", "_held", "_size", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, size: int, skip_special_tokens: bool, tail: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._skip = skip_special_tokens
        self._context = list(tail[-TAIL_AT_MOST:])
        for token in self._context:
            if token >= size:
                raise outside_vocabulary(token, size)
        self._held: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)

    def step(self, token: int) -> str:
        """See Detokenizer."""
        if token >= self._size:
            raise outside_vocabulary(token, self._size)
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the library's only way to say that earlier text changed: begin again from here
            return self.flush()
        if text is not None:
            self._context, self._held = self._held, []
            return text
        return self.flush() if len(self._held) >= self.HELD_AT_MOST else ""

    def flush(self) -> str:
        """See Detokenizer."""
        if not self._held:
            return ""
        known = self._decode(self._context)
        whole = self._decode(self._context + self._held)
        text = whole[len(known) :] if whole.startswith(known) else self._decode(self._held)
        self._context, self._held = self._held, []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class MarkerDetokenizer:
    """Another detokenizer, with the text of special tokens that it would leave out.

    Args:
        inner: leaves special tokens out.
        texts: of the special tokens that stay, by id.
    """

    __slots__ = ("_inner", "_texts", "flush")

    def __init__(self, inner: Detokenizer, texts: Mapping[int, str]) -> None:
        self._inner = inner
        self._texts = texts
        self.flush = inner.flush

    def step(self, token: int) -> str:
        """See Detokenizer."""
        text = self._texts.get(token)
        return self._inner.step(token) if text is None else self._inner.flush() + text
