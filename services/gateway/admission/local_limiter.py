"""Limits counted by a single gateway."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import WINDOW_S, Limit, LimitDecision, Limiter, LimitState


class Bucket:
    """Token bucket that holds at most `limit` and refills by that much per minute; may be in debt.

    Attributes:
        left: current content; negative for a debt.
    """

    __slots__ = ("_filled_at", "left", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.left = float(limit)
        self._filled_at = now

    def fill(self, limit: int, now: float) -> None:
        """Refills the bucket up to now; the limit may have changed."""
        self.limit = limit
        self.left = min(self.left + (now - self._filled_at) * limit / WINDOW_S, float(limit))
        self._filled_at = now

    def wait_s(self, wanted: float) -> float:
        """Returns the seconds until it contains `wanted`."""
        return max((wanted - self.left) * WINDOW_S / self.limit, 0.0)

    @property
    def state(self) -> LimitState:
        """The state for response headers."""
        return LimitState(self.limit, max(math.floor(self.left), 0), self.wait_s(self.limit))


class _Account:
    def __init__(self, now: float) -> None:
        self.requests = Bucket(0, now)
        self.tokens = Bucket(0, now)
        self.live: set[str] = set()


class LocalLimiter(Limiter):
    """Limiter in memory, with one account per key.

    Args:
        clock: monotonic clock, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        account = self._account(key)
        requests, tokens = account.requests, account.tokens
        if key.concurrency and len(account.live) >= key.concurrency:
            return self._decision(key, account, Limit.CONCURRENCY, 1.0)
        if key.requests_per_minute and requests.left < 1:
            return self._decision(key, account, Limit.REQUESTS, requests.wait_s(1))
        if key.tokens_per_minute and tokens.left < 1:
            return self._decision(key, account, Limit.TOKENS, tokens.wait_s(1))
        if key.requests_per_minute:
            requests.left -= 1
        account.live.add(request_id)
        return self._decision(key, account)

    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        account = self._account(key)
        if key.tokens_per_minute:
            if account.tokens.left < tokens:
                return self._decision(key, account, Limit.TOKENS, account.tokens.wait_s(tokens))
            account.tokens.left -= tokens
        return self._decision(key, account)

    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        account = self._account(key)
        account.live.discard(request_id)
        if key.tokens_per_minute:
            account.tokens.left = min(account.tokens.left + give_back, float(key.tokens_per_minute))

    def live(self, key: ApiKey) -> int:
        """Returns the number of running requests of a key."""
        account = self._accounts.get(key.id)
        return len(account.live) if account is not None else 0

    def _account(self, key: ApiKey) -> _Account:
        now = self._clock()
        account = self._accounts.get(key.id)
        if account is None:
            account = self._accounts[key.id] = _Account(now)
        for bucket, limit in ((account.requests, key.requests_per_minute), (account.tokens, key.tokens_per_minute)):
            if not bucket.limit and limit:  # a new limit starts with a full bucket
                bucket.left = float(limit)
            bucket.fill(limit, now)
        return account

    def _decision(self, key: ApiKey, account: _Account, by: Limit | None = None, retry_s: float = 0.0) -> LimitDecision:
        requests = account.requests.state if key.requests_per_minute else LimitState()
        tokens = account.tokens.state if key.tokens_per_minute else LimitState()
        return LimitDecision(requests, tokens, by, retry_s)
