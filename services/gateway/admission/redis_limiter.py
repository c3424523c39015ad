"""Limits shared by gateways through Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from services.common.redis.failures import FAILURES
from services.common.redis.scripts import Script, ScriptRunner
from services.common.redis.target import Credentials, parse
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import Limit, LimitDecision, Limiter, LimitState, LimitsUnavailable

LEASE_S = 60.0
EXTENDED_PER_CALL = 1000


class RedisLimiter(Limiter):
    """Limiter with one script call per decision; requests of a gateway that dies expire after `LEASE_S`.

    Args:
        url: Redis URL, in the forms of `services.common.redis.target`.
        prefix: first part of every Redis key.
        timeout_s: timeout of a script call.
        credentials: credentials that the URL does not contain.

    Raises:
        SluiceError: INVALID_ARGUMENT if the URL is invalid; the message never contains its password.
    """

    def __init__(
        self, url: str, prefix: str = "sluice", timeout_s: float = 0.25, credentials: Credentials | None = None
    ) -> None:
        self._redis = ScriptRunner(parse(url, credentials, "limits-redis-url"), timeout_s)
        self._prefix = prefix
        self._limits = _script("limits")
        self._hold = _script("hold")

    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        return await self._decide("enter", key, request_id, 0)

    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        return await self._decide("charge", key, request_id, tokens)

    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        await self._decide("settle", key, request_id, give_back)

    async def hold(self, live: Mapping[str, Sequence[str]]) -> None:
        """Extends the leases of running requests by key id; to be called every third of `LEASE_S`.

        Raises:
            LimitsUnavailable: Redis is unavailable.
        """
        for key_id, request_ids in live.items():
            for start in range(0, len(request_ids), EXTENDED_PER_CALL):
                batch = request_ids[start : start + EXTENDED_PER_CALL]
                await self._run(self._hold, [self._name(key_id, "live")], [int(LEASE_S * 1000), *batch])

    async def close(self) -> None:
        await self._redis.close()

    def _name(self, key_id: str, suffix: str) -> str:
        return f"{self._prefix}:limits:{{{key_id}}}:{suffix}"

    async def _decide(self, operation: str, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        names = [self._name(key.id, "left"), self._name(key.id, "live")]
        result = await self._run(self._limits, names, [operation, *limits, request_id, tokens, int(LEASE_S * 1000)])
        refused, wait_ms, requests_left, requests_reset_ms, tokens_left, tokens_reset_ms = result
        return LimitDecision(
            LimitState(limits[0], requests_left, requests_reset_ms / 1000),
            LimitState(limits[1], tokens_left, tokens_reset_ms / 1000),
            Limit(refused.decode()) if refused else None,
            wait_ms / 1000,
        )

    async def _run(self, script: Script, names: list[str], arguments: list[Any]) -> Any:
        try:
            return await self._redis.run(script, names, arguments)
        except FAILURES as error:
            raise LimitsUnavailable(f"{type(error).__name__}: {error}") from error


def _script(name: str) -> Script:
    return Script((files("services.gateway.admission.scripts") / f"{name}.lua").read_text("utf-8"))
