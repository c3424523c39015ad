"""Reservation ids: they say which model's book holds them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, unquote


def reservation_id(model: str, request_id: str) -> str:
    """Names a reservation; `request_of` undoes it."""
    return f"{quote(model, safe='')}:{request_id}"


def request_of(reservation: str) -> tuple[str, str]:
    """(model, request id) of a reservation id."""
    model, _, request_id = reservation.partition(":")
    return unquote(model), request_id


def by_model(reservations: Sequence[str]) -> dict[str, list[str]]:
    """Request ids of reservation ids, by model."""
    groups: dict[str, list[str]] = {}
    for reservation in reservations:
        model, request_id = request_of(reservation)
        groups.setdefault(model, []).append(request_id)
    return groups
