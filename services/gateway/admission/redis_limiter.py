"""Limits that several gateways share, in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from services.common.redis.scripts import FAILURES, Script, ScriptRunner
from services.common.redis.target import Credentials, parse
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import Limit, LimitDecision, Limiter, LimitState, LimitsUnavailable

LEASE_S = 60.0
HELD_AT_ONCE = 1000


class RedisLimiter(Limiter):
    """See Limiter. One script a decision; a gateway that dies loses its places after `LEASE_S`.

    Args:
        url: as the router's, see `services.common.redis.target`.
        prefix: first part of every key.
        timeout_s: how long Redis gets to answer.
        credentials: what the URL does not say.

    Raises:
        SluiceError: INVALID_ARGUMENT when the URL is none; the error repeats no password.
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
        """Says which requests are still under way, by key id; LimitsUnavailable as `enter`. To be said every third of
        `LEASE_S`."""
        for key_id, request_ids in live.items():
            for start in range(0, len(request_ids), HELD_AT_ONCE):
                part = request_ids[start : start + HELD_AT_ONCE]
                await self._run(self._hold, [self._name(key_id, "live")], [int(LEASE_S * 1000), *part])

    async def close(self) -> None:
        await self._redis.close()

    def _name(self, key_id: str, what: str) -> str:
        return f"{self._prefix}:limits:{{{key_id}}}:{what}"

    async def _decide(self, what: str, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        names = [self._name(key.id, "left"), self._name(key.id, "live")]
        answer = await self._run(self._limits, names, [what, *limits, request_id, tokens, int(LEASE_S * 1000)])
        refused, wait_ms, requests_left, requests_reset_ms, tokens_left, tokens_reset_ms = answer
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
