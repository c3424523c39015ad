"""Response headers with the limits of a key and what remains of them, in the format of each API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from services.gateway.admission.limits import LimitDecision, LimitState

_ANTHROPIC_PATHS = "/v1/messages"


def rate_headers(decision: LimitDecision, path: str) -> list[tuple[bytes, bytes]]:
    """Returns `x-ratelimit-…`, or on Anthropic's paths `anthropic-ratelimit-…`, for the limits that the key has."""
    formatted = _anthropic if path.startswith(_ANTHROPIC_PATHS) else _openai
    headers: list[tuple[bytes, bytes]] = []
    for name, state in (("requests", decision.requests), ("tokens", decision.tokens)):
        if state.limit:
            headers += formatted(name, state)
    return headers


def _openai(name: str, state: LimitState) -> list[tuple[bytes, bytes]]:
    return [
        (f"x-ratelimit-limit-{name}".encode(), b"%d" % state.limit),
        (f"x-ratelimit-remaining-{name}".encode(), b"%d" % state.remaining),
        (f"x-ratelimit-reset-{name}".encode(), duration(state.reset_s).encode()),
    ]


def _anthropic(name: str, state: LimitState) -> list[tuple[bytes, bytes]]:
    reset = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=state.reset_s)
    return [
        (f"anthropic-ratelimit-{name}-limit".encode(), b"%d" % state.limit),
        (f"anthropic-ratelimit-{name}-remaining".encode(), b"%d" % state.remaining),
        (f"anthropic-ratelimit-{name}-reset".encode(), reset.strftime("%Y-%m-%dT%H:%M:%SZ").encode()),
    ]


def duration(seconds: float) -> str:
    """Formats a duration as OpenAI does: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.3g}s" if minutes else f"{rest:.3g}s"
