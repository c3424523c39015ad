"""Ends of generations, roles, log-probabilities and embedded prompts; the numbers are those of `sluice.v1`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from services.common.base.errors import ErrorKind, SluiceError


class FinishReason(IntEnum):
    """Why a generation ended; values as in `sluice.v1.FinishReason`. Workers never report TOOL_CALLS."""

    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    CANCELLED = 4
    ERROR = 5
    HANDOFF = 6

    @classmethod
    def of(cls, number: int) -> FinishReason:
        """Returns the reason for a number received from a peer.

        Raises:
            SluiceError: INTERNAL for a number that this version does not define.
        """
        try:
            return cls(number)
        except ValueError:
            raise SluiceError(
                ErrorKind.INTERNAL, f"The stream ended for a reason that this version does not define ({number})."
            ) from None


class Role(IntEnum):
    """Role of a worker; values as in `sluice.v1.WorkerRole`."""

    AGGREGATED = 1
    PREFILL = 2
    DECODE = 3


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token; rank 1 is the most likely token, 0 unknown."""

    token_id: int
    logprob: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position; `top` is sorted by descending probability."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Input embeddings in place of token ids: little-endian float32, one row of `width` values per position."""

    values: bytes
    width: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return len(self.values) // (4 * self.width) if self.width else 0
