"""Log-probabilities in OpenAI's two forms: lists of objects for chats, parallel lists for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.core.request import PositionLogprobs, TokenLogprob

LOWEST = -9999.0
"""Stands for the logarithm of nothing, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of an answer.

    `piece` are its own bytes, `offset` the code points of text before it; `position` is None where no
    log-probabilities are known, as for the first token of a prompt.
    """

    token_id: int
    piece: bytes
    offset: int
    position: PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class Naming:
    """How tokens are called: by the text they stand for, or as `token_id:5`; `pieces` has alternatives' bytes by id."""

    pieces: Mapping[int, bytes]
    as_ids: bool = False

    def chat_name(self, token_id: int, piece: bytes) -> str:
        """A part of a character is spelled as `\\xf0\\x9f`."""
        return f"token_id:{token_id}" if self.as_ids else _text(piece, "")

    def completion_name(self, token_id: int, piece: bytes) -> str:
        """A part of a character is spelled as `bytes:\\xf0\\x9f`."""
        return f"token_id:{token_id}" if self.as_ids else _text(piece, "bytes:")


def chat_logprobs(tokens: Sequence[ShownToken], naming: Naming) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""
    content = [_chat_token(token, token.position, naming) for token in tokens if token.position is not None]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ShownToken], naming: Naming) -> dict[str, Any]:
    """The `logprobs` of a completion's choice. A chosen token that is not among the alternatives comes last of them."""
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


def prompt_logprobs(tokens: Sequence[ShownToken], naming: Naming) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt what the model thought of it, by id."""
    return [None if token.position is None else _by_id(token.position, token.piece, naming) for token in tokens]


def _chat_token(token: ShownToken, position: PositionLogprobs, naming: Naming) -> dict[str, Any]:
    top = [_chat_entry(one, naming.pieces.get(one.token_id, b""), naming) for one in position.top]
    return {**_chat_entry(position.chosen, token.piece, naming), "top_logprobs": top}


def _chat_entry(token: TokenLogprob, piece: bytes, naming: Naming) -> dict[str, Any]:
    return {
        "token": naming.chat_name(token.token_id, piece),
        "logprob": _finite(token.logprob),
        "bytes": list(piece),
    }


def _alternatives(name: str, position: PositionLogprobs, naming: Naming) -> dict[str, float]:
    top = {
        naming.completion_name(one.token_id, naming.pieces.get(one.token_id, b"")): _finite(one.logprob)
        for one in position.top
    }
    top.setdefault(name, _finite(position.chosen.logprob))
    return top


def _by_id(position: PositionLogprobs, piece: bytes, naming: Naming) -> dict[str, Any]:
    entries = {str(one.token_id): _described(one, naming.pieces.get(one.token_id, b"")) for one in position.top}
    entries[str(position.chosen.token_id)] = _described(position.chosen, piece)
    return entries


def _described(token: TokenLogprob, piece: bytes) -> dict[str, Any]:
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
