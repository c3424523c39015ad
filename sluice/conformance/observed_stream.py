"""All output of a worker for one request, in order and unmodified."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sluice.v1 import common_pb2, worker_pb2

REASONS = common_pb2.FinishReason


def reason_name(reason: int) -> str:
    """Returns the name of a finish reason."""
    if reason in REASONS.values():
        return REASONS.Name(REASONS.ValueType(reason)).removeprefix("FINISH_REASON_")
    return f"number {reason}"


@dataclass(slots=True)
class ObservedStream:
    """One request and its received output.

    Attributes:
        token_ids: all generated ids, in order.
        pieces: number of ids in each row.
        extras: all extras, including terminal ones.
        cached: each reported cached_tokens, and whether tokens had arrived in an earlier message.
        terminals: extras with a finish reason.
        after_terminal: number of rows and extras after the first terminal one.
        ended: set with the first terminal extra.
        began: set with the first token or the first terminal extra.
    """

    request: worker_pb2.GenerateRequest
    slot: int = 0
    token_ids: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    extras: list[worker_pb2.TokenExtra] = field(default_factory=list)
    cached: list[tuple[int, bool]] = field(default_factory=list)
    terminals: list[worker_pb2.TokenExtra] = field(default_factory=list)
    after_terminal: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def take_tokens(self, token_ids: list[int]) -> None:
        """Adds a row of ids."""
        if self.terminals:
            self.after_terminal += 1
        self.token_ids += token_ids
        self.pieces.append(len(token_ids))
        if token_ids:
            self.began.set()

    def take_extra(self, extra: worker_pb2.TokenExtra, late: bool) -> None:
        """Adds an extra; `late`: tokens had arrived in an earlier message."""
        if self.terminals:
            self.after_terminal += 1
        self.extras.append(extra)
        if extra.HasField("cached_tokens"):
            self.cached.append((extra.cached_tokens, late))
        if extra.finish_reason:
            self.terminals.append(extra)
            self.began.set()
            self.ended.set()

    @property
    def terminal(self) -> worker_pb2.TokenExtra:
        """The first terminal delta; available once `ended` is set."""
        return self.terminals[0]

    @property
    def reason(self) -> int:
        """The finish reason."""
        return self.terminal.finish_reason

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens reported as cached; 0 when not reported."""
        return self.cached[0][0] if self.cached else 0

    @property
    def logprobs(self) -> list[common_pb2.PositionLogprobs]:
        """Log-probabilities of all generated tokens, in order."""
        return [position for extra in self.extras for position in extra.logprobs]

    def describe(self) -> str:
        """Returns a short description of how the request ended."""
        if not self.terminals:
            return f"{len(self.token_ids)} tokens and no terminal delta"
        description = f"{reason_name(self.reason)} after {len(self.token_ids)} tokens"
        if self.reason == REASONS.FINISH_REASON_ERROR:
            description += f" ({self.terminal.error.message})"
        return description
