"""Network policies: who reaches whom in each overlay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.oracles.kustomized import (
    OVERLAYS,
    Object,
    matches,
    name_of,
    of_kind,
    pod_labels,
    ports_of,
    rendered,
    with_components,
)

# Who may open a connection to whom, and to which port; the design's arrows and nothing else.
ARROWS = {
    ("gateway", "preprocess", 50051),
    ("gateway", "router", 50051),
    ("gateway", "postprocess", 50051),
    ("gateway", "worker", 50051),
    ("router", "preprocess", 50051),
    ("preprocess", "router", 50051),
    ("preprocess", "worker", 50051),
    ("postprocess", "router", 50051),
    ("postprocess", "worker", 50051),
    ("worker", "router", 50051),
}

_REDIS = ("router", "redis", 6379)
ARROWS_BY_OVERLAY = {
    "mock": ARROWS | {_REDIS},
    "guarded": ARROWS | {_REDIS, ("gateway", "redis", 6379)},
    "production": ARROWS,
}


def _resolved(port: Any, target: Object) -> int:
    return ports_of(target)[port] if isinstance(port, str) else int(port)


def _opened(rules: list[Object], side: str, other: dict[str, str], port: int, owner: Object) -> bool:
    """Whether one of the rules lets `other` through at `port`; `owner` has the named ports."""
    for rule in rules:
        ports = rule.get("ports")
        if ports is not None and port not in {_resolved(one["port"], owner) for one in ports}:
            continue
        peers = rule.get(side)
        if peers is None:
            return True
        for peer in peers:
            if "podSelector" in peer and "namespaceSelector" not in peer and matches(peer["podSelector"], other):
                return True
    return False


def _reachable(objects: list[Object]) -> set[tuple[str, str, int]]:
    """Who may open a connection to whom, and to which port."""
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    pods = [one for one in objects if one["kind"] in ("Deployment", "StatefulSet")]

    def rules(workload: Object, direction: str) -> list[Object]:
        chosen = [one["spec"] for one in policies if matches(one["spec"]["podSelector"], pod_labels(workload))]
        assert any(direction in spec["policyTypes"] for spec in chosen), f"{name_of(workload)} is not closed"
        key = direction.lower()
        return [rule for spec in chosen if direction in spec["policyTypes"] for rule in spec.get(key, ())]

    reachable = set()
    for source in pods:
        for target in pods:
            for port in ports_of(target).values():
                leaves = _opened(rules(source, "Egress"), "to", pod_labels(target), port, target)
                enters = _opened(rules(target, "Ingress"), "from", pod_labels(source), port, target)
                if leaves and enters:
                    reachable.add((name_of(source), name_of(target), port))
    return reachable


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_network_policies_allow_exactly_the_arrows_of_the_design(overlay: str) -> None:
    assert _reachable(rendered(overlay)) == ARROWS_BY_OVERLAY[overlay]
    outside = [
        peer
        for one in of_kind(overlay, "NetworkPolicy")
        for rule in one["spec"].get("egress", ())
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    assert len(outside) == (2 if overlay == "production" else 0)  # Redis, and models from the hub


def test_only_gateways_that_share_something_reach_redis(tmp_path: Path) -> None:
    keys, shared = tmp_path / "keys", tmp_path / "shared"
    assert _reachable(with_components(keys, "api-keys")) == ARROWS_BY_OVERLAY["mock"]
    assert _reachable(with_components(shared, "gateway-redis")) == ARROWS_BY_OVERLAY["guarded"]
