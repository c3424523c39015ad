"""Reservation ids, which contain the model and tell whether the reservation is a prefill/decode pair.

A request that one worker prefills and another decodes has a reservation on both: under its request id on the decode
worker, and under an id derived from it on the prefill worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import quote, unquote

PAIR = "+"  # follows the quoted model name, which contains no plus sign


def reservation_id(model: str, request_id: str, paired: bool = False) -> str:
    """Returns a reservation id; `request_of` reverses it."""
    return f"{_quoted(model)}{PAIR if paired else ''}:{request_id}"


@lru_cache(maxsize=1_024)  # called for every reservation
def _quoted(model: str) -> str:
    return quote(model, safe="")


def request_of(reservation: str) -> tuple[str, str]:
    """Returns (model, request id) of a reservation id."""
    model, _, request_id = reservation.partition(":")
    model = model.removesuffix(PAIR)
    return unquote(model) if "%" in model else model, request_id


def prefill_id(request_id: str) -> str:
    """Returns the request id of the prefill half of a pair."""
    return f"{request_id}\0prefill"


def scoped(scope: str, name: str) -> str:
    """Returns the stored name of a request or owner, so that equal names of two callers do not collide.

    Args:
        scope: of the caller, see Caller.scope; empty: names are stored unchanged.
        name: an empty name stays empty.
    """
    return f"{scope}/{name}" if scope and name else name


def unscoped(scope: str, name: str) -> str:
    """Reverses `scoped`."""
    return name.removeprefix(f"{scope}/") if scope else name


def within(scope: str, reservations: Iterable[str]) -> list[str]:
    """Returns the reservations made by a caller of this scope."""
    if not scope:
        return list(reservations)
    return [each for each in reservations if request_of(each)[1].startswith(f"{scope}/")]


def by_model(reservations: Sequence[str]) -> dict[str, list[str]]:
    """Returns the request ids of reservation ids by model."""
    groups: dict[str, list[str]] = {}
    for reservation in reservations:
        model, request_id = request_of(reservation)
        groups.setdefault(model, []).append(request_id)
    return groups


def prefill_halves(reservations: Sequence[str]) -> dict[str, list[str]]:
    """Returns the request ids of the prefill halves of all pairs among the reservations, by model."""
    groups: dict[str, list[str]] = {}
    for reservation in reservations:
        if reservation.partition(":")[0].endswith(PAIR):
            model, request_id = request_of(reservation)
            groups.setdefault(model, []).append(prefill_id(request_id))
    return groups
