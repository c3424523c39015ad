"""Checks of the parameters of stages; each raises ValueError with what to write instead."""

from __future__ import annotations

from typing import Any


def share(name: str, value: Any) -> float:
    """Returns a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}")
    return float(value)


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Returns a whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return value


def number(name: str, value: Any) -> float:
    """Returns a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def text(name: str, value: Any) -> str:
    """Returns a non-empty text."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty, not {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """Returns true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value
