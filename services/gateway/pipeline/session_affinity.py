"""Session affinity: requests of one session go to one worker, see docs/router.md.

Clients choose the name of a session, so the router receives a digest of the name and the API key's tenant: tenants
never share a session, while all keys of one tenant do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from hashlib import blake2b

from services.common.errors import invalid
from services.gateway.admission import permit as permits

HEADER = "x-session-id"
SOURCES = (HEADER, "prompt_cache_key", "user")
"""Supported sources of a session's name: the header, and fields of the body."""
LONGEST_NAME = 512
_DIGEST_BYTES = 16

_current: ContextVar[str] = ContextVar("session", default="")


def current() -> str:
    """Returns the router's session id for the current request; empty: no session."""
    return _current.get()


def begin(sources: Sequence[str], headers: Mapping[str, str], fields: Mapping[str, str | None]) -> None:
    """Sets the session of the current request from the first source with a non-empty value.

    Args:
        sources: a subset of SOURCES in order of precedence; empty: no sessions.
        headers: headers of the request.
        fields: values of the body's fields, by their names in SOURCES.

    Raises:
        SluiceError: INVALID_ARGUMENT for a name of more than LONGEST_NAME characters.
    """
    for source in sources:
        name = headers.get(HEADER) if source == HEADER else fields.get(source)
        if name:
            _current.set(_session_id(source, name))
            return
    _current.set("")


def _session_id(source: str, name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise invalid(
            f"The session name in {source} has {len(name)} characters; send at most {LONGEST_NAME}.",
            param=source,
            code="invalid_value",
        )
    parts = (permits.current().owner, source, name)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()
