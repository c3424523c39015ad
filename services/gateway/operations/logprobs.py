"""Formats log-probabilities: as lists of objects for chats, as parallel lists for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.core.request import PositionLogprobs, TokenLogprob

LOWEST = -9999.0
"""Replaces negative infinity, which JSON cannot represent."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of prompt or output.

    Attributes:
        piece: the bytes of the token.
        offset: code points of text before it.
        position: its log-probabilities; None if there are none, as for the first token of a prompt.
    """

    token_id: int
    piece: bytes
    offset: int
    position: PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class Naming:
    """Names tokens by their text, or as `token_id:5`; `pieces` holds the bytes of tokens by id."""

    pieces: Mapping[int, bytes]
    as_ids: bool = False

    def chat_name(self, token_id: int, piece: bytes) -> str:
        """Returns a token's name in chats; bytes that are not UTF-8 are escaped as `\\xf0\\x9f`."""
        return f"token_id:{token_id}" if self.as_ids else _text(piece, "")

    def completion_name(self, token_id: int, piece: bytes) -> str:
        """Returns a token's name in completions; bytes that are not UTF-8 are escaped as `bytes:\\xf0\\x9f`."""
        return f"token_id:{token_id}" if self.as_ids else _text(piece, "bytes:")


def chat_logprobs(tokens: Sequence[TokenText], naming: Naming) -> dict[str, Any]:
    """Returns the `logprobs` of a chat's choice."""
    content = [_chat_token(token, token.position, naming) for token in tokens if token.position is not None]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenText], naming: Naming) -> dict[str, Any]:
    """Returns the `logprobs` of a completion's choice; the alternatives always include the chosen token."""
    names = [naming.completion_name(token.token_id, token.piece) for token in tokens]
    return {
        "tokens": names,
        "token_logprobs": [token.position and _finite(token.position.chosen.logprob) for token in tokens],
        "top_logprobs": [
            token.position and _alternatives(name, token.position, naming)
            for name, token in zip(names, tokens, strict=True)
        ],
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[TokenText], naming: Naming) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: for each token of the prompt, log-probabilities by token id."""
    return [None if token.position is None else _by_id(token.position, token.piece, naming) for token in tokens]


def _chat_token(token: TokenText, position: PositionLogprobs, naming: Naming) -> dict[str, Any]:
    top = [_chat_entry(other, naming.pieces.get(other.token_id, b""), naming) for other in position.top]
    return {**_chat_entry(position.chosen, token.piece, naming), "top_logprobs": top}


def _chat_entry(token: TokenLogprob, piece: bytes, naming: Naming) -> dict[str, Any]:
    return {
        "token": naming.chat_name(token.token_id, piece),
        "logprob": _finite(token.logprob),
        "bytes": list(piece),
    }


def _alternatives(name: str, position: PositionLogprobs, naming: Naming) -> dict[str, float]:
    top = {
        naming.completion_name(other.token_id, naming.pieces.get(other.token_id, b"")): _finite(other.logprob)
        for other in position.top
    }
    top.setdefault(name, _finite(position.chosen.logprob))
    return top


def _by_id(position: PositionLogprobs, piece: bytes, naming: Naming) -> dict[str, Any]:
    entries = {str(other.token_id): _entry(other, naming.pieces.get(other.token_id, b"")) for other in position.top}
    entries[str(position.chosen.token_id)] = _entry(position.chosen, piece)
    return entries


def _entry(token: TokenLogprob, piece: bytes) -> dict[str, Any]:
    return {
        "logprob": _finite(token.logprob),
        "rank": token.rank or None,
        "decoded_token": piece.decode("utf-8", "replace"),
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def _text(piece: bytes, prefix: str) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in piece)
