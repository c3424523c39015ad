"""What counts as a flood."""

from __future__ import annotations

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.router.registration.stream_messages import (
    LEAST_HASHES,
    MOST_MESSAGES,
    MOST_TURNOVERS,
    WINDOW_S,
    FloodGuard,
)
from services.router.workers.worker import Role, Worker


def guard(now: list[float], total_blocks: int = 100, ranks: int = 1) -> FloodGuard:
    worker = Worker("w", "w:1", 1, "m", Role.AGGREGATED, 16, "sluice-xxh3-v1", total_blocks, ranks, b"")
    return FloodGuard(worker, lambda: now[0])


def test_too_many_messages() -> None:
    flood = guard([0.0])
    flood.count(MOST_MESSAGES, 0)
    with pytest.raises(SluiceError, match="Worker w sent too much") as caught:
        flood.count(1, 0)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.OVERLOADED, "flood")


def test_a_large_cache_may_say_more_and_every_rank_has_its_own_share() -> None:
    flood = guard([0.0], total_blocks=LEAST_HASHES, ranks=2)
    flood.count(2 * MOST_MESSAGES, 2 * MOST_TURNOVERS * LEAST_HASHES)
    with pytest.raises(SluiceError):
        flood.count(0, 1)


def test_a_new_window_starts_from_nothing() -> None:
    now = [0.0]
    flood = guard(now)
    for _ in range(5):
        flood.count(10, LEAST_HASHES)
        now[0] += WINDOW_S
    flood.count(10, LEAST_HASHES)
    with pytest.raises(SluiceError):
        flood.count(10, 1)
