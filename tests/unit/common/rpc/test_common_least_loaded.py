"""The least load, and chance among equals."""

from __future__ import annotations

from services.common.rpc.replicas import idlest


def test_equals_are_chosen_alike_and_the_idlest_always() -> None:
    load = {"a": 0, "b": 0, "c": 0}
    assert idlest([], load.__getitem__) is None
    assert idlest(["b"], load.__getitem__) == "b"
    assert {idlest(load, load.__getitem__) for _ in range(200)} == {"a", "b", "c"}
    load["a"] = load["c"] = 1
    assert {idlest(load, load.__getitem__) for _ in range(50)} == {"b"}
