"""Adapters of a model's workers, whose changes a gateway hears of later than it makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError, not_found
from services.gateway.backends.workers import fleet_control
from services.gateway.backends.workers.fleet_control import FleetControl
from services.gateway.backends.workers.fleet_store import MemoryFleetStore
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from sluice.v1 import worker_pb2
from tests.support.oracles.errors import raises_error


class Fleet(FleetControl):
    """Workers with adapters, and a registry that has a change `lag_s` after it is made.

    Args:
        loadable: ids of the workers that load adapters; the other one cannot.
    """

    def __init__(self, workers: int, lag_s: float, loadable: int | None = None) -> None:
        self.registry = WorkerRegistry(cast(Any, None), lambda entry: None, lambda worker_id: None)
        for number in range(workers):
            entry = WorkerEntry(f"w{number}", f"h:{number}", 1, "m", 16, 100, 100, frozenset(), 0)
            self.registry.workers[entry.worker_id] = entry
        self.held: dict[str, set[str]] = {name: set() for name in self.registry.workers}
        self.lag_s = lag_s
        self.loadable = workers if loadable is None else loadable
        super().__init__(self.registry, None, MemoryFleetStore())

    async def _run(self, entry: Any, action: Any, arguments: Mapping[str, str]) -> None:
        held, name = self.held[entry.worker_id], arguments["name"]
        if int(entry.worker_id[1:]) >= self.loadable:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "No adapters.", code="unsupported_by_engine")
        if action == worker_pb2.ControlRequest.ACTION_LOAD_LORA:
            if name in held:
                raise SluiceError(ErrorKind.FAILED_PRECONDITION, "It is.", code="adapter_loaded")
            held.add(name)
        elif name in held:
            held.remove(name)
        else:
            raise not_found("It is not.", code="adapter_not_found")
        asyncio.get_running_loop().call_later(self.lag_s, self._hear, entry.worker_id, tuple(held))

    def _hear(self, worker_id: str, adapters: tuple[str, ...]) -> None:
        self.registry.workers[worker_id] = replace(self.registry.workers[worker_id], adapters=adapters)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(["poet", "cook"])), max_size=8),
    st.sampled_from([0.0, 0.001, 0.05]),
)
async def test_actions_on_adapters_take_effect_whatever_is_heard(actions: list[tuple[bool, str]], lag_s: float) -> None:
    fleet, loaded = Fleet(3, lag_s), set[str]()
    for load, name in actions:
        if load:
            assert await fleet.load_adapter("m", name, "") == ["w0", "w1", "w2"]
            loaded.add(name)
            assert all(name in entry.adapters for entry in fleet.registry.workers.values()), "requests can name it"
        elif name in loaded:
            assert await fleet.unload_adapter("m", name) == ["w0", "w1", "w2"]
            loaded.remove(name)
        else:
            with raises_error(kind=ErrorKind.NOT_FOUND, code="adapter_not_found"):
                await fleet.unload_adapter("m", name)
        assert all(held == loaded for held in fleet.held.values())


async def test_unload_asks_workers_whose_load_another_gateway_made() -> None:
    fleet = Fleet(2, 0.0)
    fleet.held["w1"].add("poet")
    assert await fleet.unload_adapter("m", "poet") == ["w1"]
    assert not fleet.held["w1"]


async def test_unload_passes_over_workers_without_adapters() -> None:
    fleet = Fleet(2, 0.0, loadable=1)
    fleet.held["w0"].add("poet")
    assert await fleet.unload_adapter("m", "poet") == ["w0"]


async def test_load_that_the_gateway_does_not_hear_of_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_control, "LISTED_S", 0.1)
    fleet = Fleet(1, 60.0)
    with raises_error(kind=ErrorKind.UNAVAILABLE, code="adapter_not_listed"):
        await fleet.load_adapter("m", "poet", "")
