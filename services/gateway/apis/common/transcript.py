"""What a model said in one turn, block by block in its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.gateway.apis.openai.logprobs import ShownToken


class Kind(Enum):
    """What a block is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block; of a call the pieces are its arguments, JSON text as the model wrote it."""

    kind: Kind
    call: int = -1
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)  # of text, when they are shown

    @property
    def said(self) -> str:
        """All of it."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a turn; cached ones are part of the prompt's, reasoning ones of the generated."""

    prompt: int = 0
    generated: int = 0
    cached: int = 0
    reasoning: int = 0


class Transcript:
    """Gathers blocks: a piece belongs to the last one when it is of its kind."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, kind: Kind, piece: str, tokens: Sequence[ShownToken] = ()) -> None:
        """The next text or thinking."""
        if not self.blocks or self.blocks[-1].kind is not kind:
            self.blocks.append(Block(kind))
        block = self.blocks[-1]
        block.pieces.append(piece)
        block.tokens += tokens

    def add_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """The next piece of call number `call`; its first one has id and name."""
        if name or not self.blocks or self.blocks[-1].call != call:
            self.blocks.append(Block(Kind.CALL, call, call_id, name))
        self.blocks[-1].pieces.append(arguments)


class TokensAside:
    """Tokens that came before what they stand for, until that is known to be text."""

    def __init__(self) -> None:
        self._tokens: list[ShownToken] = []

    def add(self, tokens: Sequence[ShownToken]) -> None:
        """The next ones."""
        self._tokens += tokens

    def take(self) -> list[ShownToken]:
        """All of them: they are of the text that goes out now."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def skip(self, piece: str) -> None:
        """Forgets those that a piece of thinking or of a call was made of."""
        left = len(piece.encode())
        done = 0
        while left > 0 and done < len(self._tokens):
            left -= len(self._tokens[done].piece)
            done += 1
        del self._tokens[:done]
