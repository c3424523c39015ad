"""The session of a request: requests of one session go to one worker, see docs/router.md.

A session's name comes from the client, so the router gets a digest of it that contains the tenant of the API key:
clients of different tenants never share a session, whatever they send. Keys of one tenant share theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from hashlib import blake2b

from services.common.errors import invalid
from services.gateway.admission import permit as permits

HEADER = "x-session-id"
SOURCES = (HEADER, "prompt_cache_key", "user")
"""Where a session's name may come from: the header, and fields of the body."""
LONGEST_NAME = 512
_DIGEST_BYTES = 16

_current: ContextVar[str] = ContextVar("session", default="")


def current() -> str:
    """Returns the router's session id for the request at hand; empty: it belongs to none."""
    return _current.get()


def begin(sources: Sequence[str], headers: Mapping[str, str], fields: Mapping[str, str | None]) -> None:
    """Finds the session of the request at hand; the first of the sources that is sent and not empty names it.

    Args:
        sources: some of SOURCES, what counts most first; empty: requests have no sessions.
        headers: of the request.
        fields: of its body, by their names in SOURCES.

    Raises:
        SluiceError: INVALID_ARGUMENT for a name that is longer than LONGEST_NAME characters.
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
            f"{source} names a session and has {len(name)} characters; send at most {LONGEST_NAME}.",
            param=source,
            code="invalid_value",
        )
    parts = (permits.current().owner, source, name)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()
