"""Why a request is not admitted."""

from __future__ import annotations

from services.common.errors import ErrorKind, SluiceError, quoted, shortened
from services.gateway.admission.keys import ANONYMOUS, ApiKey
from services.gateway.admission.limits import Limit, LimitDecision
from services.gateway.admission.scopes import Scope

LONGEST_RETRY_S = 3600.0


class Refused(SluiceError):
    """A request is not admitted; `reason` is one of those that metrics have."""

    def __init__(
        self, reason: str, kind: ErrorKind, message: str, code: str, wait_s: float = 0, param: str = ""
    ) -> None:
        super().__init__(kind, message, param=param, code=code, retry_after_ms=int(wait_s * 1000))
        self.reason = reason


class OverLimit(Refused):
    """A limit of a key refuses; `decision` is what the limiter said."""

    def __init__(self, reason: str, decision: LimitDecision, message: str, code: str, wait_s: float) -> None:
        super().__init__(reason, ErrorKind.OVERLOADED, message, code, wait_s)
        self.decision = decision


def no_key(shown: bool) -> Refused:
    """Returns the error for a missing or unknown API key."""
    said = (
        "The API key is not valid."
        if shown
        else "You did not show an API key: send it as authorization: Bearer KEY, or as x-api-key: KEY."
    )
    return Refused("wrong_key" if shown else "no_key", ErrorKind.UNAUTHENTICATED, said, "invalid_api_key")


def not_for(model: str, field: str) -> Refused:
    """The key may use other models, and other adapters."""
    kind = "model" if field == "model" else "adapter"
    said = f"This API key may not use the {kind} {quoted(model)}."
    return Refused("model", ErrorKind.PERMISSION_DENIED, said, "model_not_allowed", param=field)


def lacks(key: ApiKey, scope: Scope, field: str, subject: str) -> Refused:
    """The key does not have the scope that a path, a header or a field needs."""
    if key.id == ANONYMOUS.id:
        why = "this gateway's --anonymous-scopes do not grant"
    else:
        why = f"this API key lacks (an operator can grant it: sluice keys set {key.id} --scope …)"
    said = f"{shortened(subject)} needs the scope '{scope}', which {why}."
    return Refused("scope", ErrorKind.PERMISSION_DENIED, said, "scope_missing", param=field)


def no_room(reason: str, why: str, wait_s: float) -> Refused:
    """The gateway has too much to do."""
    return Refused(
        reason, ErrorKind.UNAVAILABLE, f"The gateway is overloaded: {why}; try again later.", "overloaded", wait_s
    )


def over(key: ApiKey, decision: LimitDecision) -> Refused:
    """A limit of the key does not allow it now."""
    limits = {
        Limit.REQUESTS: f"{key.requests_per_minute} requests a minute",
        Limit.TOKENS: f"{key.tokens_per_minute} tokens a minute",
        Limit.CONCURRENCY: f"{key.concurrency} requests at once",
        None: "nothing",
    }
    wait_s = min(decision.retry_after_s, LONGEST_RETRY_S)
    said = f"This API key may use {limits[decision.refused_by]}; try again in {max(wait_s, 0.001):.3g} s."
    return OverLimit(decision.refused_by or "tokens", decision, said, "rate_limit_exceeded", wait_s)


def never(key: ApiKey, tokens: int, decision: LimitDecision) -> Refused:
    """More tokens than the key ever has at once."""
    said = (
        f"This request may take {tokens} tokens, prompt and answer together, but this API key has "
        f"{key.tokens_per_minute} a minute: shorten the prompt or lower max_tokens."
    )
    return OverLimit("request_too_large", decision, said, "request_over_token_limit", LONGEST_RETRY_S)
