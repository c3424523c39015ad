"""How often a process of `sluice up` is restarted."""

from __future__ import annotations

from sluice.cli.up.restarts import MAX_PAUSE_S, MAX_RESTARTS, RESTART_WINDOW_S, Restarts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_restarts_pause_longer_each_time_and_are_bounded() -> None:
    restarts = Restarts(clock=Clock())
    assert [restarts.allow("worker-0") for _ in range(MAX_RESTARTS + 1)] == [0, 0.5, 1, 2, 4, None]
    assert restarts.allow("worker-1") == 0


def test_restarts_after_the_window_begin_without_a_pause() -> None:
    clock = Clock()
    restarts = Restarts(clock=clock)
    while restarts.allow("router") is not None:
        pass
    clock.now += RESTART_WINDOW_S + 1
    assert restarts.allow("router") == 0


def test_pause_has_a_maximum() -> None:
    restarts = Restarts(most=20, clock=Clock())
    assert max(restarts.allow("router") or 0 for _ in range(20)) == MAX_PAUSE_S


def test_no_restart_is_allowed_where_the_maximum_is_zero() -> None:
    assert Restarts(most=0).allow("router") is None
