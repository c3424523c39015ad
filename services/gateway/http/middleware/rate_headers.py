"""What a client's limits are and what is left of them, as headers in the way of each API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from services.gateway.admission.limits import LimitDecision, LimitState

_ANTHROPIC_PATHS = "/v1/messages"


def rate_headers(decision: LimitDecision, path: str) -> list[tuple[bytes, bytes]]:
    """`x-ratelimit-…`, or `anthropic-ratelimit-…` where that API is spoken; only for limits the key has."""
    of_api = _anthropic if path.startswith(_ANTHROPIC_PATHS) else _openai
    found: list[tuple[bytes, bytes]] = []
    for name, level in (("requests", decision.requests), ("tokens", decision.tokens)):
        if level.limit:
            found += of_api(name, level)
    return found


def _openai(name: str, level: LimitState) -> list[tuple[bytes, bytes]]:
    return [
        (f"x-ratelimit-limit-{name}".encode(), b"%d" % level.limit),
        (f"x-ratelimit-remaining-{name}".encode(), b"%d" % level.remaining),
        (f"x-ratelimit-reset-{name}".encode(), duration(level.reset_s).encode()),
    ]


def _anthropic(name: str, level: LimitState) -> list[tuple[bytes, bytes]]:
    reset = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=level.reset_s)
    return [
        (f"anthropic-ratelimit-{name}-limit".encode(), b"%d" % level.limit),
        (f"anthropic-ratelimit-{name}-remaining".encode(), b"%d" % level.remaining),
        (f"anthropic-ratelimit-{name}-reset".encode(), reset.strftime("%Y-%m-%dT%H:%M:%SZ").encode()),
    ]


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.3g}s" if minutes else f"{rest:.3g}s"
