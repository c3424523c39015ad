"""Shared limits with local ones to fall back on."""

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
"""The reason that answers carry while this gateway counts alone."""
MOST_OWED = 1000


class FallbackLimiter(Limiter):
    """Asks the shared limits, and counts alone while they do not answer: then every gateway allows what the key has.

    A request is charged and settled where it entered. A place that Redis may hold for one that is counted elsewhere, or
    whose end it did not hear, is given up with the key's next request that it does hear of, or by time.
    """

    def __init__(self, shared: RedisLimiter) -> None:
        self._shared = shared
        self._local = LocalLimiter()
        self._breaker = Breaker()
        self._live: dict[str, ApiKey] = {}  # entered at the shared limits, by request id
        # Places to give up there, and until when: by key id, then by request id.
        self._owed: dict[str, dict[str, float]] = {}
        self._away = False

    @property
    def degraded(self) -> str:
        return LOCAL if self._away else ""

    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        if self._breaker.passable:
            self._breaker.try_pass()
            try:
                await self._give_up_places(key)
                decision = await self._shared.enter(key, request_id)
            except LimitsUnavailable as error:
                self._owe(key, request_id)
                self._failed(error)
            else:
                self._answered()
                if decision.refused_by is None:
                    self._live[request_id] = key
                return decision
        return await self._local.enter(key, request_id)

    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        if request_id in self._live:
            try:
                return await self._shared.charge(key, request_id, tokens)
            except LimitsUnavailable as error:
                self._failed(error)
                del self._live[request_id]
                self._owe(key, request_id)
        return await self._local.charge(key, request_id, tokens)

    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        if self._live.pop(request_id, None) is None:
            await self._local.settle(key, request_id, give_back)
        elif self._away:
            self._owe(key, request_id)
        else:
            try:
                await self._shared.settle(key, request_id, give_back)
            except LimitsUnavailable as error:
                self._owe(key, request_id)
                self._failed(error)

    async def run(self) -> None:
        """Keeps the places of long requests; until cancelled."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            live: dict[str, list[str]] = {}
            for request_id, key in self._live.items():
                live.setdefault(key.id, []).append(request_id)
            if live and not self._away:
                try:
                    await self._shared.hold(live)
                except LimitsUnavailable as error:
                    self._failed(error)

    async def close(self) -> None:
        await self._shared.close()

    def _owe(self, key: ApiKey, request_id: str) -> None:
        owed = self._owed.setdefault(key.id, {})
        if len(owed) < MOST_OWED:
            owed[request_id] = monotonic() + LEASE_S

    async def _give_up_places(self, key: ApiKey) -> None:
        owed = self._owed.pop(key.id, None)
        while owed:
            request_id, until = next(iter(owed.items()))
            if until > monotonic():
                try:
                    await self._shared.settle(key, request_id, 0)
                except LimitsUnavailable:
                    self._owed.setdefault(key.id, {}).update(owed)
                    raise
            del owed[request_id]

    def _failed(self, error: LimitsUnavailable) -> None:
        self._breaker.failed()
        if not self._away:
            self._away = True
            log.warning("the shared limits do not answer; this gateway counts alone: %s", error)

    def _answered(self) -> None:
        self._breaker.succeeded()
        if self._away:
            self._away = False
            log.info("the shared limits answer again")
