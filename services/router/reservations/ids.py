"""Reservation ids: they say which model's book holds them, and whether there are two of them.

A request that one worker prefills and another decodes is booked on both: under its own id where it decodes, and under
another made from it where it is prefilled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote

PAIR = "+"  # after the model's name, where quoting leaves no plus sign


def reservation_id(model: str, request_id: str, paired: bool = False) -> str:
    """Names a reservation; `request_of` undoes it."""
    return f"{quote(model, safe='')}{PAIR if paired else ''}:{request_id}"


def request_of(reservation: str) -> tuple[str, str]:
    """(model, request id) of a reservation id."""
    model, _, request_id = reservation.partition(":")
    return unquote(model.removesuffix(PAIR)), request_id


def prefill_id(request_id: str) -> str:
    """The request id under which the prefill half of a pair is booked."""
    return f"{request_id}\0prefill"


def scoped(scope: str, name: str) -> str:
    """Returns the name of a request or an owner as it is booked: two callers that choose the same one mean two.

    Args:
        scope: the caller's, see Caller.scope; empty: names are booked as they are.
        name: empty stays empty.
    """
    return f"{scope}/{name}" if scope and name else name


def unscoped(scope: str, name: str) -> str:
    """Undoes `scoped`."""
    return name.removeprefix(f"{scope}/") if scope else name


def within(scope: str, reservations: Iterable[str]) -> list[str]:
    """Returns those of the reservations that were booked by a caller of this scope."""
    if not scope:
        return list(reservations)
    return [each for each in reservations if request_of(each)[1].startswith(f"{scope}/")]


def by_model(reservations: Sequence[str]) -> dict[str, list[str]]:
    """Request ids of reservation ids, by model."""
    groups: dict[str, list[str]] = {}
    for reservation in reservations:
        model, request_id = request_of(reservation)
        groups.setdefault(model, []).append(request_id)
    return groups


def prefill_halves(reservations: Sequence[str]) -> dict[str, list[str]]:
    """Request ids of the prefill halves of those reservations that are pairs, by model."""
    groups: dict[str, list[str]] = {}
    for reservation in reservations:
        if reservation.partition(":")[0].endswith(PAIR):
            model, request_id = request_of(reservation)
            groups.setdefault(model, []).append(prefill_id(request_id))
    return groups
