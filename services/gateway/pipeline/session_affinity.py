"""Session affinity: requests of one session go to one worker, see docs/router.md.

Clients choose the name of a session, so the router receives a digest of the name and the API key's tenant: tenants
never share a session, while all keys of one tenant do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from services.common.base.errors import invalid
from services.gateway.core import context

HEADER = "x-session-id"
SOURCES = (HEADER, "prompt_cache_key", "user")
"""Supported sources of a session's name: the header, and fields of the body."""
MAX_NAME_LENGTH = 512
"""Characters of a session's name; a longer one is refused with INVALID_ARGUMENT."""
_DIGEST_BYTES = 16


def enter_session(sources: Sequence[str], headers: Mapping[str, str], fields: Mapping[str, str | None]) -> None:
    """Sets the session in the context of the current request, from the first source with a non-empty value.

    Args:
        sources: a subset of SOURCES in order of precedence; empty: no sessions.
        headers: headers of the request.
        fields: values of the body's fields, by their names in SOURCES.

    Raises:
        SluiceError: INVALID_ARGUMENT for a name of more than MAX_NAME_LENGTH characters.
    """
    outer = context.current()
    names = ((source, headers.get(HEADER) if source == HEADER else fields.get(source)) for source in sources)
    session_id = next((_session_id(outer.permit.owner, source, name) for source, name in names if name), "")
    context.enter(outer._replace(session_id=session_id))


def _session_id(owner: str, source: str, name: str) -> str:
    if len(name) > MAX_NAME_LENGTH:
        raise invalid(
            f"The session name in {source} has {len(name)} characters; send at most {MAX_NAME_LENGTH}.",
            param=source,
            code="invalid_value",
        )
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in (owner, source, name):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()
