"""The cache salts that belong to tenants, which no client may choose.

A gateway derives them from the tenant of a request; they keep tenants apart in the prefix caches of engines that they
share. Every entrance for bodies of clients refuses them: a gateway, and an endpoint picker that has none behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.base.errors import invalid

PREFIX = "sluice-tenant-"
SALT_FIELDS = ("cache_salt", "extra_key")
"""Fields that select a cache namespace, in a body or among its engine options."""
OPTION_FIELDS = ("vllm_xargs", "custom_params", "nvext")
"""Fields with the options of an engine."""
_CHECKED = frozenset((*SALT_FIELDS, *OPTION_FIELDS))


def check_chosen(chosen: str, param: str = SALT_FIELDS[0]) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for a client's salt in the format of those of tenants.

    A gateway without salts passes it on unchanged, to workers that other gateways may share.

    Args:
        param: the field that holds it.
    """
    if chosen.startswith(PREFIX):
        raise invalid(
            f"{param} must not start with {PREFIX!r}, which is reserved for the salts of tenants.",
            param=param,
            code="invalid_value",
        )


def check_body(body: Mapping[str, Any]) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for a body of any API that holds a tenant's salt where engines read one."""
    if _CHECKED.isdisjoint(body):
        return
    for option in ("", *OPTION_FIELDS):
        fields = body.get(option) if option else body
        if not isinstance(fields, Mapping):
            continue
        for name in SALT_FIELDS:
            if isinstance(chosen := fields.get(name), str):
                check_chosen(chosen, f"{option}.{name}" if option else name)
