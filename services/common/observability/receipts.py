"""Route receipts, which gateways and the endpoint picker report on request: headers, and why a worker was chosen."""

from __future__ import annotations

ASKED = "x-sluice-receipt"
"""Header of a request that asks for receipts."""

RECEIPT = "x-sluice-route-receipt"
"""Header of the response with them: a JSON list."""

NAMED = "named_by_request"

_YES = frozenset({"1", "true", "yes"})


def is_asked(value: str) -> bool:
    """Returns whether the value of the header ASKED asks for receipts."""
    return value.strip().lower() in _YES


def reason_of(degraded: str, policy: str, session_hit: bool, predicted: int, available: int) -> str:
    """Returns why a worker was chosen, as one word.

    Args:
        degraded: the fallback that chose; empty: none.
        policy: routing policy that chose; empty: the request named the worker.
        session_hit: whether the worker of the session's last request was chosen.
        predicted: prompt tokens expected in the cache of the worker.
        available: most prompt tokens that any candidate was expected to have cached.
    """
    if degraded:
        return degraded
    if policy in ("", "direct"):
        return NAMED
    if session_hit:
        return "session"
    if policy != "kv":
        return f"policy_{policy}"
    if not available:
        return "least_load"
    return "longest_prefix" if predicted >= available else "load_over_prefix"
