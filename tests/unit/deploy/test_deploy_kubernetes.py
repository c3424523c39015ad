"""The Kubernetes overlays: what schemas check, and what they cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.oracles.kustomized import (
    OVERLAYS,
    SETTINGS,
    Object,
    matches,
    name_of,
    of_kind,
    pod_labels,
    ports_of,
    rendered,
    with_components,
    workloads,
)
from tests.support.repository import ROOT


def replicas_of(workload: Object) -> int | None:
    count: int | None = workload["spec"].get("replicas")
    return count


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_passes_the_strict_schema(overlay: str) -> None:
    checked = 0
    for item in rendered(overlay):
        if item["apiVersion"].split("/")[0].endswith((".coreos.com", "cert-manager.io")):
            continue  # custom resources: their schemas come with their operators
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
        checked += 1
    assert checked > 30


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_of_an_overlay_have_unique_names_in_its_namespace(overlay: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered(overlay)]
    assert len(set(names)) == len(names)
    assert {item["metadata"].get("namespace") for item in rendered(overlay)} == {"sluice"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_match_exactly_their_pods(overlay: str) -> None:
    for workload in workloads(overlay):
        selecting = [one for one in workloads(overlay) if matches(workload["spec"]["selector"], pod_labels(one))]
        assert selecting == [workload]
        for spread in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert matches(spread["labelSelector"], pod_labels(workload))
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        assert [one for one in workloads(overlay) if matches(budget["spec"]["selector"], pod_labels(one))], budget
    for service in of_kind(overlay, "Service"):
        behind = [one for one in workloads(overlay) if service["spec"]["selector"].items() <= pod_labels(one).items()]
        assert {name_of(one) for one in behind} == {service["metadata"]["name"]}
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in ports_of(one) for one in behind)
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in {
            (one["kind"], one["metadata"]["name"]) for one in workloads(overlay)
        }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_service_scales_and_survives_a_drain_of_its_node(overlay: str) -> None:
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in of_kind(overlay, "HorizontalPodAutoscaler")}
    guarded = {budget["metadata"]["name"] for budget in of_kind(overlay, "PodDisruptionBudget")}
    for workload in of_kind(overlay, "Deployment"):
        assert workload["metadata"]["name"] in guarded
        assert workload["metadata"]["name"] in scaled or (name_of(workload) == "worker" and overlay != "production")
        # A number in the manifest would undo the autoscaler's work with every apply.
        assert (replicas_of(workload) is None) is (workload["metadata"]["name"] in scaled)
        # Callers look names up every two seconds, DNS keeps an answer for five.
        assert workload["spec"]["minReadySeconds"] >= 10


def test_custom_metrics_of_autoscalers_exist() -> None:
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in of_kind("production", "HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert asked
    assert asked <= set(re.findall(r"`(sluice_\w+)`", (ROOT / "docs/metrics.md").read_text()))


def test_the_alert_rules_are_those_of_the_source() -> None:
    (rule,) = of_kind("production", "PrometheusRule")
    source = yaml.safe_load((ROOT / "deploy/observability/rules/sluice.yaml").read_text())
    maker = "deploy/kubernetes/components/monitoring/make_rules.py"
    assert rule["spec"] == source, f"run python {maker}"


def test_prometheus_scrapes_every_service_under_a_name_that_the_rules_know() -> None:
    (monitor,) = of_kind("production", "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    scraped = {
        service["metadata"]["name"]
        for service in of_kind("production", "Service")
        if matches(monitor["spec"]["selector"], service["metadata"]["labels"])
        and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    }
    assert scraped == SETTINGS.keys()
    (relabeling,) = endpoint["relabelings"]
    job = re.escape(relabeling["replacement"]).replace(re.escape("$1"), ".*")
    rules = (ROOT / "deploy/observability/rules/sluice.yaml").read_text()
    for pattern in re.findall(r'job=~"([^"]*)"', rules):
        assert re.fullmatch(pattern, job.replace(".*", "gateway").replace("\\", "")), pattern


def test_every_dashboard_is_a_config_map_for_grafana() -> None:
    found = {
        name: text
        for item in of_kind("production", "ConfigMap")
        if item["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
        for name, text in item["data"].items()
    }
    wanted = {file.name: file.read_text() for file in (ROOT / "deploy/observability/dashboards").glob("*.json")}
    assert found == wanted


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


def test_media_fetch_component_opens_public_addresses_to_preprocess_alone(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "media-fetch")
    (policy,) = [
        one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "preprocess-media"
    ]
    kubernetes_validate.validate(policy, kubernetes_validate.latest_version(), strict=True)
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "preprocess"
    (rule,) = policy["spec"]["egress"]
    assert rule["ports"] == [{"port": 443}]
    for address in ("10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.20.0.1", "192.168.1.1", "fd00::1"):
        assert not _is_open(rule, address), address
    assert _is_open(rule, "93.184.215.14")
    assert _is_open(rule, "2606:2800:21f::1")


def _is_open(rule: Mapping[str, Any], address: str) -> bool:
    found = ip_address(address)
    return any(
        found in ip_network(peer["ipBlock"]["cidr"])
        and not any(found in ip_network(but) for but in peer["ipBlock"].get("except", ()))
        for peer in rule["to"]
    )


def test_engines_component_adds_the_arrows_of_its_workers(tmp_path: Path) -> None:
    added = _reachable(with_components(tmp_path, "engines")) - ARROWS_BY_OVERLAY["mock"]
    # Gateways are open to every pod. The ports of the workers are a range, which the pod does not name.
    assert {(source, target) for source, target, _ in added} == {("engines", "router"), ("engines", "gateway")}
