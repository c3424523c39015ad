"""Incremental detokenization: a byte table with a UTF-8 decoder if that is exact, else the library's decode stream.

Each stream has its own detokenizer. It returns a character only when all its bytes have arrived; invalid UTF-8 becomes
U+FFFD.
"""

from __future__ import annotations

import codecs
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.common.base.errors import SluiceError, invalid

EACH_BYTE = "sluice-replace-each-byte"
"""Codec error handler of byte-fallback decoders: one U+FFFD per invalid byte, where "replace" has one per sequence."""

MAX_TAIL = 32
"""Number of tokens at the end of the prompt that detokenizers take into account."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


def outside_vocabulary(token: int, size: int) -> SluiceError:
    """Returns the error for a token id that is not in the vocabulary."""
    return invalid(
        f"Token id {token} is outside the vocabulary; use ids below {size}.", param="token_ids", code="token_unknown"
    )


def fallback_byte(token: str) -> bytes:
    """Returns the byte of a token such as <0x0A>; empty for all other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return b""
    return b""


class Detokenizer(Protocol):
    """Converts the token ids of one stream to text."""

    def step(self, token: int) -> str:
        """Returns the text completed by a token, often empty; raises SluiceError (INVALID_ARGUMENT) for unknown ids."""

    def flush(self) -> str:
        """Returns the text held back, at the end of the stream."""

    def peek(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of tokens if `step` would return it without a change of state; None if that is uncertain."""


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Bytes and text of every token id.

    Attributes:
        pieces: the bytes by id.
        texts: the text by id; None if the bytes alone are not complete UTF-8.
        errors: codec error handler for invalid UTF-8.
        breaks: ids without bytes that end an incomplete character.
        opening: returns the bytes of an id at the beginning of a text; None if they do not differ.
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
        """Returns a table for these pieces."""
        return cls(pieces, [_complete(piece) for piece in pieces], errors, breaks, opening)

    def without(self, specials: frozenset[int], breaks: frozenset[int] = frozenset()) -> ByteTable:
        """Returns a copy in which special ids have no text."""
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
    """Concatenates the bytes of ids and decodes them as UTF-8, with the same result as decoding all at once.

    Args:
        table: the vocabulary.
        tail: last ids of the prompt, which may end with an incomplete character.
    """

    __slots__ = ("_opening", "_pending", "_pieces", "_plain", "_table", "_texts")

    def __init__(self, table: ByteTable, tail: Sequence[int] = ()) -> None:
        self._table = table
        self._texts = table.texts
        self._pieces = table.pieces
        self._pending = b""  # an incomplete character of at most 3 bytes
        self._opening = table.opening
        self._plain = self._opening is None
        tail = tail[-MAX_TAIL:]
        if self.peek(tail) is None:
            for token in tail:
                self.step(token)

    def step(self, token: int) -> str:
        try:
            if self._plain:
                text = self._texts[token]
                if text is not None:
                    return text
            piece = self._pieces[token]
        except IndexError:
            raise outside_vocabulary(token, len(self._pieces)) from None
        return self._join(token, piece)

    def peek(self, tokens: Sequence[int]) -> str | None:
        if not self._plain:
            return None
        try:
            return "".join(map(self._texts.__getitem__, tokens))  # type: ignore[arg-type]
        except (TypeError, IndexError):  # a token with None for its text, or outside the vocabulary
            return None

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
        text = utf_8_decode(self._pending, self._table.errors, True)[0]
        self._pending = b""
        self._plain = self._opening is None
        return text


class LibraryDetokenizer:
    """Uses the incremental decoder of `tokenizers`, for decoders whose text is not a concatenation of pieces.

    Args:
        tokenizer: shared between streams, only read.
        size: upper bound of the ids.
        skip_special_tokens: omit special tokens.
        tail: last ids of the prompt, for decoders that depend on the preceding text.
    """

    MAX_HELD = 32
    """Tokens held back without complete text before they are decoded as they are; a character has at most 4 bytes."""

    __slots__ = ("_context", "_held", "_size", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, size: int, skip_special_tokens: bool, tail: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._skip = skip_special_tokens
        self._context = list(tail[-MAX_TAIL:])
        for token in self._context:
            if token >= size:
                raise outside_vocabulary(token, size)
        self._held: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)

    def step(self, token: int) -> str:
        if token >= self._size:
            raise outside_vocabulary(token, self._size)
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # raised by the library when earlier text changes: start again from here
            return self.flush()
        if text is not None:
            self._context, self._held = self._held, []
            return text
        return self.flush() if len(self._held) >= self.MAX_HELD else ""

    def peek(self, tokens: Sequence[int]) -> str | None:
        return None

    def flush(self) -> str:
        if not self._held:
            return ""
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        text = after[len(before) :] if after.startswith(before) else self._decode(self._held)
        self._context, self._held = self._held, []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class MarkerDetokenizer:
    """Adds the text of some special tokens to a detokenizer that omits them.

    Args:
        inner: detokenizer without special tokens.
        texts: of the special tokens to add, by id.
    """

    __slots__ = ("_inner", "_texts", "flush")

    def __init__(self, inner: Detokenizer, texts: Mapping[int, str]) -> None:
        self._inner = inner
        self._texts = texts
        self.flush = inner.flush

    def step(self, token: int) -> str:
        text = self._texts.get(token)
        return self._inner.step(token) if text is None else self._inner.flush() + text

    def peek(self, tokens: Sequence[int]) -> str | None:
        return self._inner.peek(tokens) if self._texts.keys().isdisjoint(tokens) else None
