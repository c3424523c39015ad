"""Tenants in the prefix cache: a salt for each, so that none can find out what another one has sent.

The salt of a request is made of its tenant and of the salt that the client chose. It travels as `cache_salt`: into the
block hashes, to the router and to the engine.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

from services.common.errors import invalid

TenantSalt = Literal["auto", "on", "off"]
SHARED = "tenant_cache_shared"
"""Reason in `degraded`: no engine of the model separates tenants, and the request ran all the same."""
PREFIX = "sluice-tenant-"
_DIGITS = 32


def salted(tenant: str, chosen: str) -> str:
    """The salt of a tenant's requests.

    The tenant's length stands before its name, so no salt that a client chooses makes one tenant's digest another's.

    Args:
        tenant: owner of the key, see `ApiKey.owner`.
        chosen: the client's own salt; empty for none.
    """
    name = tenant.encode()
    return PREFIX + sha256(len(name).to_bytes(4, "big") + name + chosen.encode()).hexdigest()[:_DIGITS]


def check_chosen(chosen: str) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for a client's salt that looks like one of `salted`.

    A gateway that does not salt passes it on as it is, to workers that other gateways may share.
    """
    if chosen.startswith(PREFIX):
        raise invalid(
            f"cache_salt must not begin with {PREFIX!r}: gateways keep tenants apart by it.",
            param="cache_salt",
            code="invalid_value",
        )


def separates(capabilities: frozenset[str]) -> bool:
    """Whether a worker with these capabilities keeps requests of different salts apart."""
    return "cache_salt" in capabilities
