"""Limits of API keys: their state, decisions, and the interface of limiters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from services.gateway.admission.keys import ApiKey

WINDOW_S = 60.0


class Limit(StrEnum):
    """A limit of an API key."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class LimitState:
    """State of a limit per minute.

    Attributes:
        limit: allowed per minute; 0 for no limit.
        remaining: available now; never below 0.
        reset_s: seconds until all of it is available.
    """

    limit: int = 0
    remaining: int = 0
    reset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """Decision of a limiter.

    Attributes:
        refused_by: the limit that is exceeded; None if the request is allowed.
        retry_after_s: seconds until a retry may be allowed; 0 if the request is.
    """

    requests: LimitState = LimitState()
    tokens: LimitState = LimitState()
    refused_by: Limit | None = None
    retry_after_s: float = 0.0


class LimitsUnavailable(Exception):
    """The shared limits are unavailable."""


class Limiter(ABC):
    """Counts requests, tokens and concurrency of keys.

    Requests and tokens are buckets that hold the limit of a minute and refill steadily. The tokens of a request are
    charged when its prompt length is known, including what it may generate; the difference is settled at its end, so a
    bucket may be in debt. Each method is atomic.
    """

    @abstractmethod
    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        """Counts a new request until `settle`, unless a limit is exceeded.

        Raises:
            LimitsUnavailable: the shared limits are unavailable.
        """

    @abstractmethod
    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        """Charges tokens, unless fewer remain; raises LimitsUnavailable."""

    @abstractmethod
    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        """Ends a request and refunds tokens, or charges more if negative."""

    @property
    def degraded(self) -> str:
        """Why a fallback is in use; empty if it is not."""
        return ""

    async def close(self) -> None:
        """Closes connections."""
        return
