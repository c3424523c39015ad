"""The output of one turn as an ordered list of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.gateway.operations.logprobs import TokenText


class BlockKind(Enum):
    """The kind of a block."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block; the pieces of a call are its arguments, as the JSON text that the model generated."""

    kind: BlockKind
    call: int = -1
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)  # text blocks only, if log-probabilities were requested

    @property
    def text(self) -> str:
        """The joined pieces."""
        return "".join(self.pieces)


class Transcript:
    """Collects blocks; consecutive pieces of the same kind form one block."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, kind: BlockKind, piece: str, tokens: Sequence[TokenText] = ()) -> None:
        """Appends a piece of text or reasoning."""
        if not self.blocks or self.blocks[-1].kind is not kind:
            self.blocks.append(Block(kind))
        block = self.blocks[-1]
        block.pieces.append(piece)
        block.tokens += tokens

    def add_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """Appends a piece of call number `call`; only its first piece has an id and a name."""
        if name or not self.blocks or self.blocks[-1].call != call:
            self.blocks.append(Block(BlockKind.CALL, call, call_id, name))
        self.blocks[-1].pieces.append(arguments)


class PendingTokens:
    """Holds tokens that arrive before the output they belong to, until that output is known to be text."""

    def __init__(self) -> None:
        self._tokens: list[TokenText] = []

    def add(self, tokens: Sequence[TokenText]) -> None:
        self._tokens += tokens

    def take(self) -> list[TokenText]:
        """Returns and removes all tokens: they belong to the text being sent."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def skip(self, piece: str) -> None:
        """Drops the tokens of a piece of reasoning or of a call."""
        remaining = len(piece.encode())
        count = 0
        while remaining > 0 and count < len(self._tokens):
            remaining -= len(self._tokens[count].piece)
            count += 1
        del self._tokens[:count]
