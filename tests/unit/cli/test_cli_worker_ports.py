"""The ports of the workers of running servers."""

from __future__ import annotations

from sluice.cli.up.engines.workers import WorkerPorts


def test_worker_that_is_restarted_keeps_its_port() -> None:
    ports = WorkerPorts(5000)
    assert [ports.of("a", ()), ports.of("b", {"a"}), ports.of("a", {"b"})] == [5000, 5001, 5000]


def test_port_of_a_removed_worker_is_used_again_once_it_has_stopped() -> None:
    ports = WorkerPorts(5000)
    assert [ports.of("a", ()), ports.of("b", {"a"})] == [5000, 5001]
    assert ports.of("c", {"a", "b"}) == 5002
    assert ports.of("d", {"b", "c"}) == 5000


def test_without_a_first_port_each_worker_has_a_free_one() -> None:
    ports = WorkerPorts()
    first, second = ports.of("a", ()), ports.of("b", {"a"})
    assert first != second
    assert ports.of("a", {"b"}) == first
