"""Route receipts: what a routing decision predicted, what was possible, what was delivered, and why this worker."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from services.common.observability.receipts import NAMED
from services.gateway.core.request import Route


class Receipt(TypedDict):
    """A route receipt as clients receive it. Lengths are prompt tokens.

    `available_cached_tokens` is the most that any worker was expected to have cached; it and `predicted_cached_tokens`
    are absent if the request named its worker, because this gateway predicted nothing. `delivered_cached_tokens` is
    absent until the worker has reported it.
    """

    worker: str
    rank: int | None
    prefill_worker: NotRequired[str]
    prompt_tokens: int
    predicted_cached_tokens: NotRequired[int]
    available_cached_tokens: NotRequired[int]
    delivered_cached_tokens: NotRequired[int]
    waited_ms: int
    reason: str


def receipt_of(route: Route, prompt_tokens: int, delivered: int | None) -> Receipt:
    """Returns the receipt of a route.

    Args:
        delivered: cached prompt tokens reported by the worker; None: not yet.
    """
    receipt: Receipt = {
        "worker": route.worker_id,
        "rank": route.rank,
        "prompt_tokens": prompt_tokens,
        "waited_ms": route.waited_ms,
        "reason": route.reason,
    }
    if receipt["reason"] != NAMED:
        receipt["predicted_cached_tokens"] = min(route.predicted_cached_tokens, prompt_tokens)
        receipt["available_cached_tokens"] = min(route.best_cached_tokens, prompt_tokens)
    if route.prefill_worker_id:
        receipt["prefill_worker"] = route.prefill_worker_id
    if delivered is not None:
        receipt["delivered_cached_tokens"] = delivered
    return receipt
