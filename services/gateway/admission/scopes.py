"""Scopes: what the holder of an API key may do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from services.common.errors import invalid


class Scope(StrEnum):
    """One thing that a key may do. `sluice keys` and `--anonymous-scopes` take these names."""

    INFER = "infer"
    """Run models, list them, count and render tokens."""
    PRIORITY = "priority"
    """Choose the place of a request in the lines of routers and engines."""
    PIN_WORKER = "pin-worker"
    """Choose workers and ranks, and read which ones would be chosen."""
    TEMPLATE = "template"
    """Send the source of a chat template; names of installed templates need no scope of their own."""
    OPERATE = "operate"
    """Read the live view and the metrics: requests and workers of every tenant."""


ALL = frozenset(Scope)
DEFAULT = frozenset({Scope.INFER})
"""Scopes of a key whose record names none."""


def parse(names: Iterable[object]) -> frozenset[Scope]:
    """The scopes of these names; SluiceError(INVALID_ARGUMENT) for a name that does not exist."""
    found = set()
    for name in names:
        try:
            found.add(Scope(str(name)))
        except ValueError:
            known = ", ".join(Scope)
            raise invalid(
                f"scopes: {str(name)[:40]!r} does not exist; choose from {known}.", param="scopes", code="invalid_value"
            ) from None
    return frozenset(found)


def ordered(scopes: Iterable[Scope]) -> list[str]:
    """Their names in the order in which they are declared."""
    held = frozenset(scopes)
    return [str(scope) for scope in Scope if scope in held]
