"""Limits per key: what is counted, what a decision says, and the interface of those who count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from services.gateway.admission.keys import ApiKey

WINDOW_S = 60.0


class Limit(StrEnum):
    """Which limit refused a request."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class LimitState:
    """How far a limit per minute is used up.

    Attributes:
        limit: a minute's worth; 0: there is no such limit.
        remaining: what may be used now; never below 0.
        reset_s: seconds until all of it may be used again.
    """

    limit: int = 0
    remaining: int = 0
    reset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """What a limiter says.

    Attributes:
        refused_by: the limit that does not allow it; None when it is allowed.
        retry_after_s: when it may be allowed; 0 when it is.
    """

    requests: LimitState = LimitState()
    tokens: LimitState = LimitState()
    refused_by: Limit | None = None
    retry_after_s: float = 0.0


class LimitsUnavailable(Exception):
    """The shared limits cannot be asked now."""


class Limiter(ABC):
    """Counts requests, tokens and concurrency of keys.

    Requests and tokens are buckets that hold a minute's worth and fill steadily. The tokens of a request are taken when
    its prompt is known, with what it may generate; the difference is settled at its end, so a bucket may be in debt.
    Every method is one atomic step among concurrent callers.
    """

    @abstractmethod
    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        """Counts a request that begins; it holds its place until `settle`. Refused ones are not counted.

        Raises:
            LimitsUnavailable: the limits cannot be checked.
        """

    @abstractmethod
    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        """Takes tokens; refused when fewer are left; LimitsUnavailable as `enter`."""

    @abstractmethod
    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        """A request is over: gives up its place and gives tokens back, or takes more when negative."""

    @property
    def degraded(self) -> str:
        """Why it does not count as it should; empty when it does."""
        return ""

    async def close(self) -> None:
        """Lets go of connections."""
        return
