"""Upper bounds for the numbers and names in queries, checked before anything is reserved."""

from __future__ import annotations

from services.common.errors import check_name, invalid
from services.router.scheduling.queries import Query

MOST_TOKENS = 1 << 24
MOST_MS = 24 * 3600 * 1000
MOST_NAME = 512  # characters of a name chosen by the caller; names become keys


def check_tokens(name: str, tokens: int) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) for a length that no model supports."""
    if tokens > MOST_TOKENS:
        raise invalid(f"{name} is {tokens}; the maximum is {MOST_TOKENS}.", param=name)


def check(query: Query) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) that names the first field out of bounds."""
    check_tokens("prompt.prompt_tokens", query.prompt.prompt_tokens)
    check_tokens("expected_output_tokens", query.expected_output_tokens)
    times = {"ttl_ms": query.ttl_ms, "session_ttl_ms": query.session_ttl_ms, "max_wait_ms": query.max_wait_ms}
    for name, milliseconds in times.items():
        if milliseconds > MOST_MS:
            raise invalid(f"{name} is {milliseconds}; the maximum is one day, {MOST_MS}.", param=name)
    names = {"request_id": query.request_id, "session_id": query.session_id}
    for name, text in names.items():
        if len(text) > MOST_NAME:
            raise invalid(f"{name} has {len(text)} characters; the maximum is {MOST_NAME}.", param=name)
    check_owner(query.owner)


def check_owner(owner: str) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) for an owner name that is too long or not printable."""
    check_name(owner, "owner", MOST_NAME)
