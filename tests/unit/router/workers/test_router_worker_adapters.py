"""Which workers may run a request for a LoRA adapter."""

from __future__ import annotations

from services.router.workers.adapter_worker import Role, Worker, with_adapter


def adapter_worker(name: str, *adapters: str) -> Worker:
    return Worker(name, "host:1", 1, "m", Role.AGGREGATED, 16, "x", 10, 1, b"", adapters=adapters)


def test_those_that_hold_it() -> None:
    workers = [adapter_worker("a"), adapter_worker("b", "poet"), adapter_worker("c", "poet", "clerk")]
    assert [one.worker_id for one in with_adapter(workers, "poet")] == ["b", "c"]
    assert with_adapter(workers, "") == workers


def test_adapters_without_a_card_are_left_to_the_worker() -> None:
    workers = [adapter_worker("a"), adapter_worker("b", "clerk")]
    assert with_adapter(workers, "poet") == workers


def test_a_store_keeps_what_a_worker_holds() -> None:
    one = adapter_worker("b", "poet")
    assert Worker.from_json(one.to_json()) == one
