"""Why a request is not admitted."""

from __future__ import annotations

from services.common.errors import ErrorKind, SluiceError
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import Decision, Limit

LONGEST_RETRY_S = 3600.0


class OverLimit(SluiceError):
    """A limit of a key refuses; `decision` is what the limiter said."""

    def __init__(self, decision: Decision, message: str, code: str, wait_s: float) -> None:
        super().__init__(ErrorKind.OVERLOADED, message, code=code, retry_after_ms=int(wait_s * 1000))
        self.decision = decision


def no_key(shown: bool) -> SluiceError:
    """Nobody, or somebody unknown."""
    said = (
        "The API key is not valid."
        if shown
        else "You did not show an API key: send it as authorization: Bearer KEY, or as x-api-key: KEY."
    )
    return SluiceError(ErrorKind.UNAUTHENTICATED, said, code="invalid_api_key")


def not_for(model: str) -> SluiceError:
    """The key may use other models."""
    return SluiceError(
        ErrorKind.PERMISSION_DENIED,
        f"This API key may not use the model {model!r}.",
        param="model",
        code="model_not_allowed",
    )


def over(key: ApiKey, decision: Decision) -> SluiceError:
    """A limit of the key does not allow it now."""
    limits = {
        Limit.REQUESTS: f"{key.requests_per_minute} requests a minute",
        Limit.TOKENS: f"{key.tokens_per_minute} tokens a minute",
        Limit.CONCURRENCY: f"{key.concurrency} requests at once",
        None: "nothing",
    }
    wait_s = min(decision.retry_after_s, LONGEST_RETRY_S)
    said = f"This API key may use {limits[decision.refused_by]}; try again in {max(wait_s, 0.001):.3g} s."
    return OverLimit(decision, said, "rate_limit_exceeded", wait_s)


def never(key: ApiKey, tokens: int, decision: Decision) -> SluiceError:
    """More tokens than the key ever has at once."""
    said = (
        f"This request may take {tokens} tokens, prompt and answer together, but this API key has "
        f"{key.tokens_per_minute} a minute: shorten the prompt or lower max_tokens."
    )
    return OverLimit(decision, said, "request_over_token_limit", LONGEST_RETRY_S)
