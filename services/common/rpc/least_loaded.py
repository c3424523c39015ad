"""Who gets the next one, of several that can take it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def idlest(candidates: Iterable[T], load: Callable[[T], int]) -> T | None:
    """One of those with the least load; None of none. Any of them, or all callers with little to do take the first."""
    found = list(candidates)
    if len(found) < 2:
        return found[0] if found else None
    least = min(map(load, found))
    return random.choice([one for one in found if load(one) == least])
