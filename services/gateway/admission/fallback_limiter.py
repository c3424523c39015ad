"""Limits shared through Redis, with local limits as the fallback."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from services.common.rpc.breaker import Breaker
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import LimitDecision, Limiter, LimitsUnavailable
from services.gateway.admission.local_limiter import LocalLimiter
from services.gateway.admission.redis_limiter import LEASE_S, RedisLimiter

log = logging.getLogger(__name__)

LOCAL = "limits_local"
"""Reason in `x-sluice-degraded` while this gateway applies limits on its own."""
MAX_UNRELEASED = 1000
"""Ended requests of a key whose release Redis has not received; further ones count until their lease ends."""


class FallbackLimiter(Limiter):
    """Applies the shared limits, and local ones while Redis is unavailable: each gateway then grants the full limits.

    A request is charged and settled by the limiter that admitted it. Requests that Redis may still count although they
    ended or moved to the local limiter are released with the key's next request, or expire.
    """

    def __init__(self, shared: RedisLimiter) -> None:
        self._shared = shared
        self._local = LocalLimiter()
        self._breaker = Breaker()
        self._shared_requests: dict[str, ApiKey] = {}  # admitted by the shared limits, by request id
        # Requests to release there: expiry by key id and request id.
        self._unreleased: dict[str, dict[str, float]] = {}
        self._unavailable = False

    @property
    def degraded(self) -> str:
        return LOCAL if self._unavailable else ""

    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        if self._breaker.passable:
            self._breaker.try_pass()
            try:
                await self._release_requests(key)
                decision = await self._shared.enter(key, request_id)
            except LimitsUnavailable as error:
                self._release_later(key, request_id)
                self._failed(error)
            else:
                self._succeeded()
                if decision.refused_by is None:
                    self._shared_requests[request_id] = key
                return decision
        return await self._local.enter(key, request_id)

    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        if request_id in self._shared_requests:
            try:
                return await self._shared.charge(key, request_id, tokens)
            except LimitsUnavailable as error:
                self._failed(error)
                del self._shared_requests[request_id]
                self._release_later(key, request_id)
        return await self._local.charge(key, request_id, tokens)

    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        if self._shared_requests.pop(request_id, None) is None:
            await self._local.settle(key, request_id, give_back)
        elif self._unavailable:
            self._release_later(key, request_id)
        else:
            try:
                await self._shared.settle(key, request_id, give_back)
            except LimitsUnavailable as error:
                self._release_later(key, request_id)
                self._failed(error)

    async def run(self) -> None:
        """Extends the leases of running requests until cancelled."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            live: dict[str, list[str]] = {}
            for request_id, key in self._shared_requests.items():
                live.setdefault(key.id, []).append(request_id)
            if live and not self._unavailable:
                try:
                    await self._shared.hold(live)
                except LimitsUnavailable as error:
                    self._failed(error)

    async def close(self) -> None:
        await self._shared.close()

    def _release_later(self, key: ApiKey, request_id: str) -> None:
        requests = self._unreleased.setdefault(key.id, {})
        if len(requests) < MAX_UNRELEASED:
            requests[request_id] = monotonic() + LEASE_S

    async def _release_requests(self, key: ApiKey) -> None:
        requests = self._unreleased.pop(key.id, None)
        while requests:
            request_id, expires_at = next(iter(requests.items()))
            if expires_at > monotonic():
                try:
                    await self._shared.settle(key, request_id, 0)
                except LimitsUnavailable:
                    self._unreleased.setdefault(key.id, {}).update(requests)
                    raise
            del requests[request_id]

    def _failed(self, error: LimitsUnavailable) -> None:
        self._breaker.failed()
        if not self._unavailable:
            self._unavailable = True
            log.warning("Redis is unavailable; applying the limits of API keys locally: %s", error)

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        if self._unavailable:
            self._unavailable = False
            log.info("Redis is available again; applying the shared limits of API keys")
