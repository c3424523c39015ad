"""How the cost of some work grows with the size of its input, in CPU time: a busy machine changes that little."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

ATTEMPTS = 3
FLOOR_S = 0.001
"""Shorter work is not told from noise."""


def growth(work: Callable[[int], object], size: int, times: int, bound: float) -> float:
    """Returns how often the cost of one unit at `size` fits into its cost at `size * times`.

    That is about 1 for work that is linear and about `times` for work that is quadratic. The least of a few attempts
    counts; no more are made once one is below `bound`.
    """
    work(size)  # what is made once and kept does not count
    least = float("inf")
    for _ in range(ATTEMPTS):
        small, large = _cost(work, size), _cost(work, size * times)
        least = min(least, large / times / max(small, FLOOR_S))
        if least < bound:
            break
    return least


def _cost(work: Callable[[int], object], size: int) -> float:
    began = process_time()
    work(size)
    return process_time() - began
