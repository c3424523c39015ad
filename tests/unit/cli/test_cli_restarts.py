"""How often a process is started again."""

from __future__ import annotations

from sluice.cli.up.supervisor import Restarts


def test_each_process_has_its_own_allowance_and_gets_it_back() -> None:
    now = 100.0
    restarts = Restarts(most=2, within_s=60, clock=lambda: now)
    assert [restarts.allow("worker-0") for _ in range(3)] == [True, True, False]
    assert restarts.allow("worker-1")
    now += 59
    assert not restarts.allow("worker-0")
    now += 2
    assert [restarts.allow("worker-0") for _ in range(3)] == [True, True, False]


def test_none_at_all() -> None:
    assert not Restarts(most=0).allow("worker-0")
