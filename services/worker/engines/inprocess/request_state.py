"""The state of one request in flight: what was sent to its sink, and how it ends."""

from __future__ import annotations

from services.common.base.errors import SluiceError
from services.worker.contract.engine import Sink
from services.worker.contract.generation import FinishReason, StructuredOutput, Usage
from services.worker.engines.shared.grammar_compiler import naming_constraint

LOWEST_LOGPROB = -9999.0
"""Replaces negative infinity, which JSON cannot represent."""


class InflightState:
    """Counts the tokens of one request and finishes its sink once.

    Args:
        prompt_tokens: Length of the caller's prompt.
        guided: The constraint on its output, if any.

    Attributes:
        ended: Whether the sink has finished; later outputs are dropped.
    """

    def __init__(self, prompt_tokens: int, sink: Sink, guided: StructuredOutput | None) -> None:
        self.ended = False
        self.prompt_tokens = prompt_tokens
        self._sink = sink
        self._guided = guided
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the sink has begun."""
        return self._cached_tokens is not None

    @property
    def _reported_cached(self) -> int | None:
        """What the usage says of cached tokens."""
        return self._cached_tokens or 0

    def end(
        self,
        reason: FinishReason,
        error: SluiceError | None = None,
        *,
        stop_token_id: int | None = None,
        handoff: bytes = b"",
    ) -> None:
        """Finishes the sink unless it has finished."""
        if not self.ended:
            self.ended = True
            usage = Usage(self.prompt_tokens, self._completion_tokens, self._reported_cached)
            cause = None if error is None else naming_constraint(error, self._guided)
            self._sink.finish(reason, usage, stop_token_id=stop_token_id, error=cause, handoff=handoff)
