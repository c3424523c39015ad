"""Scopes: permissions of API keys."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from services.common.base.errors import invalid


class Scope(StrEnum):
    """A permission of a key, by its name in `sluice keys` and `--anonymous-scopes`."""

    INFER = "infer"
    """Run models, list them, count and render tokens."""
    PRIORITY = "priority"
    """Set the priority of a request in the queues of routers and engines."""
    PIN_WORKER = "pin-worker"
    """Select workers and ranks, and read which ones would be selected."""
    TEMPLATE = "template"
    """Send the source of a chat template; names of installed templates do not require it."""
    OPERATE = "operate"
    """Read the live view and the metrics, which show requests and workers of all tenants, and operate workers."""


ALL = frozenset(Scope)
DEFAULT = frozenset({Scope.INFER})
"""Scopes of a key without explicit ones."""


def parse(names: Iterable[object]) -> frozenset[Scope]:
    """Returns the scopes with these names; raises SluiceError(INVALID_ARGUMENT) for an unknown name."""
    found = set()
    for name in names:
        try:
            found.add(Scope(str(name)))
        except ValueError:
            names_of_all = ", ".join(Scope)
            raise invalid(
                f"scopes: {str(name)[:40]!r} does not exist; choose from {names_of_all}.",
                param="scopes",
                code="invalid_value",
            ) from None
    return frozenset(found)


def ordered(scopes: Iterable[Scope]) -> list[str]:
    """Returns the names of scopes in order of declaration."""
    members = frozenset(scopes)
    return [str(scope) for scope in Scope if scope in members]
