"""Separates tenants in the prefix cache by a salt, so that none can detect what another one has sent.

The salt of a request is derived from its tenant and the salt chosen by the client. As `cache_salt` it becomes part of
the block hashes, and is sent to the router and the engine.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

from services.common.security.tenant_salts import PREFIX

TenantSalt = Literal["auto", "on", "off"]
SHARED = "tenant_cache_shared"
"""Reason in `degraded` of a request that ran on an engine that does not separate tenants."""
_DIGITS = 32


def salted(tenant: str, chosen: str) -> str:
    """Returns the salt of a tenant's requests.

    The name is prefixed with its length, so that no chosen salt results in the digest of another tenant.

    Args:
        tenant: owner of the key, see `ApiKey.owner`.
        chosen: salt chosen by the client; empty for none.
    """
    name = tenant.encode()
    return PREFIX + sha256(len(name).to_bytes(4, "big") + name + chosen.encode()).hexdigest()[:_DIGITS]


def separates(capabilities: frozenset[str]) -> bool:
    """Returns whether a worker with these capabilities separates requests with different salts."""
    return "cache_salt" in capabilities
