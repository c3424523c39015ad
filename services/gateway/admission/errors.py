"""Errors of requests that are not admitted."""

from __future__ import annotations

from services.common.base.errors import ErrorKind, SluiceError, quoted, shortened
from services.gateway.admission.keys import ANONYMOUS, ApiKey
from services.gateway.admission.limits import Limit, LimitDecision
from services.gateway.admission.scopes import Scope

MAX_RETRY_S = 3600.0
"""Seconds of a `Retry-After` after a limit of an API key; a longer wait is announced as this."""


class Refused(SluiceError):
    """A request that is not admitted; `reason` is a label value of the metric `refused`."""

    def __init__(
        self, kind: ErrorKind, message: str, *, reason: str, code: str, param: str = "", wait_s: float = 0
    ) -> None:
        super().__init__(kind, message, param=param, code=code, retry_after_ms=int(wait_s * 1000))
        self.reason = reason


class OverLimit(Refused):
    """A request that exceeds a limit of its API key."""

    def __init__(self, message: str, *, reason: str, code: str, wait_s: float, decision: LimitDecision) -> None:
        super().__init__(ErrorKind.OVERLOADED, message, reason=reason, code=code, wait_s=wait_s)
        self.decision = decision


def missing_key() -> Refused:
    """Returns the error for a request without an API key."""
    message = 'Missing API key; send it as "Authorization: Bearer KEY" or "x-api-key: KEY".'
    return Refused(ErrorKind.UNAUTHENTICATED, message, reason="no_key", code="invalid_api_key")


def invalid_key() -> Refused:
    """Returns the error for an API key that is unknown or revoked."""
    message = "The API key is invalid or revoked; send a valid one."
    return Refused(ErrorKind.UNAUTHENTICATED, message, reason="wrong_key", code="invalid_api_key")


def model_not_allowed(model: str, field: str) -> Refused:
    """Returns the error for a model or adapter that the key may not use."""
    kind = "model" if field == "model" else "adapter"
    message = f"This API key may not use the {kind} {quoted(model)}; GET /v1/models lists the models it may use."
    return Refused(ErrorKind.PERMISSION_DENIED, message, reason="model", code="model_not_allowed", param=field)


def missing_scope(key: ApiKey, scope: Scope, field: str, subject: str) -> Refused:
    """Returns the error for a key without the scope that a path, header or field requires."""
    if key.id == ANONYMOUS.id:
        why = "this gateway's --anonymous-scopes do not grant"
    else:
        why = f"this API key lacks (an operator can grant it: sluice keys set {key.id} --scope …)"
    message = f"{shortened(subject)} needs the scope '{scope}', which {why}."
    return Refused(ErrorKind.PERMISSION_DENIED, message, reason="scope", code="scope_missing", param=field)


def queue_full(retry_s: float) -> Refused:
    """Returns the error for a request without a place in the queue."""
    message = "The gateway is overloaded: the queue is full; try again later."
    return Refused(ErrorKind.OVERLOADED, message, reason="queue_full", code="overloaded", wait_s=retry_s)


def queue_timeout(waited_s: float, retry_s: float) -> Refused:
    """Returns the error for a request that waited too long in the queue."""
    message = f"The gateway is overloaded: the request waited {waited_s:g} s in the queue; try again later."
    return Refused(ErrorKind.OVERLOADED, message, reason="queue_timeout", code="overloaded", wait_s=retry_s)


def rate_limited(key: ApiKey, decision: LimitDecision) -> OverLimit:
    """Returns the error for a request that exceeds a limit of its key now."""
    limit = decision.refused_by or Limit.TOKENS
    allowed = {
        Limit.REQUESTS: f"{key.requests_per_minute} requests per minute",
        Limit.TOKENS: f"{key.tokens_per_minute} tokens per minute",
        Limit.CONCURRENCY: f"{key.concurrency} concurrent requests",
    }
    wait_s = min(decision.retry_after_s, MAX_RETRY_S)
    message = f"This API key is limited to {allowed[limit]}; try again in {max(wait_s, 0.001):.3g} s."
    return OverLimit(message, reason=limit, code="rate_limit_exceeded", wait_s=wait_s, decision=decision)


def exceeds_token_limit(key: ApiKey, tokens: int, decision: LimitDecision) -> OverLimit:
    """Returns the error for a request that needs more tokens than its key has per minute."""
    message = (
        f"This request may need {tokens} tokens, prompt and output together, but this API key is limited to "
        f"{key.tokens_per_minute} per minute: shorten the prompt or lower max_tokens."
    )
    code = "request_over_token_limit"
    return OverLimit(message, reason="request_too_large", code=code, wait_s=MAX_RETRY_S, decision=decision)
