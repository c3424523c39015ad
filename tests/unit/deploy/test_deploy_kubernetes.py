"""The Kubernetes overlays: what schemas check, and what they cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common.health import LIVE
from services.common.settings import SECRETS_DIR, ServiceSettings
from services.gateway.settings import GatewaySettings
from services.postprocess.settings import PostprocessSettings
from services.preprocess.settings import PreprocessSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "preprocess": PreprocessSettings,
    "router": RouterSettings,
    "postprocess": PostprocessSettings,
    "worker": WorkerSettings,
}
OWN = "app.kubernetes.io/name"
GATEWAY_PATHS = {"/ready", "/health"}

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
ARROWS_BY_OVERLAY = {"mock": ARROWS | {("router", "redis", 6379)}, "production": ARROWS}

Object = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Object]:
    return kustomize(KUBERNETES / "overlays" / overlay)


def kustomize(folder: Path) -> list[Object]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not on this machine, and no package registry has one: overlays are not checked")
    made = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    return [item for item in yaml.safe_load_all(made.stdout) if item]


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    return [item for item in rendered(overlay) if item["kind"] in kinds]


def workloads(overlay: str) -> list[Object]:
    return of_kind(overlay, "Deployment", "StatefulSet")


def pod_labels(workload: Object) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def replicas_of(workload: Object) -> int | None:
    count: int | None = workload["spec"].get("replicas")
    return count


def container_of(workload: Object) -> Object:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def name_of(workload: Object) -> str:
    return pod_labels(workload)[OWN]


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """A label selector with matchLabels and In expressions; anything else fails the test."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def ports_of(workload: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}


def environment(overlay: str, workload: Object) -> dict[str, str]:
    """Variable by name, as the container gets it; values that only the cluster knows are empty."""
    maps = {item["metadata"]["name"]: item["data"] for item in of_kind(overlay, "ConfigMap")}
    container = container_of(workload)
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    return found | {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}


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
def test_everything_lies_in_the_overlays_namespace_under_a_name_of_its_own(overlay: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered(overlay)]
    assert len(set(names)) == len(names)
    assert {item["metadata"].get("namespace") for item in rendered(overlay)} == {"sluice"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_match_exactly_their_own_pods(overlay: str) -> None:
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
        assert workload["metadata"]["name"] in scaled or (overlay, name_of(workload)) == ("mock", "worker")
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_hit_real_endpoints(overlay: str) -> None:
    for workload in workloads(overlay):
        container = container_of(workload)
        name = name_of(workload)
        if name == "redis":
            continue
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if name == "gateway":
                # What is behind the gateway comes and goes: a restart of the gateway would not help.
                assert probe["httpGet"]["path"] == ("/ready" if kind == "readinessProbe" else "/health")
                assert probe["httpGet"]["port"] in ports_of(workload)
            elif "grpc" in probe:
                assert probe["grpc"]["port"] == ports_of(workload)["grpc"]
                assert probe["grpc"].get("service", "") == (LIVE if kind == "livenessProbe" else "")
            else:
                command = probe["exec"]["command"]
                assert command[:3] == ["python3" if name == "worker" else "python", "-m", "services.common.probe"]
                assert command[3:6] == [f"127.0.0.1:{ports_of(workload)['grpc']}", "--service", name]
                assert ("--live" in command) is (kind == "livenessProbe")
                assert probe["timeoutSeconds"] > 3  # the probe's own limit, and a Python to start
        uses_tls = bool(environment(overlay, workload).get(f"SLUICE_{name.upper()}_TLS_CERT"))
        assert name == "gateway" or uses_tls is ("exec" in container["readinessProbe"])


def test_the_gateway_serves_what_its_probes_ask() -> None:
    source = (ROOT / "services" / "gateway" / "app.py").read_text()
    assert all(f'"{path}"' in source for path in GATEWAY_PATHS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_a_setting_and_its_value_is_accepted(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for workload in workloads(overlay):
        name = name_of(workload)
        if name == "redis":
            continue
        settings = SETTINGS[name]
        prefix = f"SLUICE_{name.upper()}_"
        given = environment(overlay, workload)
        ours = {key: value for key, value in given.items() if key.startswith("SLUICE_")}
        known = {f"{prefix}{field.upper()}" for field in settings.model_fields}
        assert ours.keys() <= known, f"{name}: {sorted(ours.keys() - known)}"
        with monkeypatch.context() as patched:
            for key, value in ours.items():
                if value and "$(" not in value:
                    patched.setenv(key, value)
            loaded = settings.load([])
        grace_s = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > before_stop_s(workload) + loaded.drain_s + getattr(loaded, "grace_s", 0) + 5


def before_stop_s(workload: Object) -> float:
    """How long a pod that is told to stop goes on as before."""
    hook = container_of(workload).get("lifecycle", {}).get("preStop")
    if hook is None:
        return 0
    command, seconds = hook["exec"]["command"]
    assert command == "sleep"
    return float(seconds)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateway_goes_on_until_nobody_sends_it_new_connections(overlay: str) -> None:
    (gateway,) = [one for one in workloads(overlay) if name_of(one) == "gateway"]
    assert before_stop_s(gateway) >= 5


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_stands_in_a_config_map_and_every_secret_is_named(overlay: str) -> None:
    for item in of_kind(overlay, "ConfigMap"):
        for key, value in item["data"].items():
            assert not re.search("PASSWORD|TOKEN|SECRET|API_KEY", key), key
            assert not re.search(r"://[^/]*:[^/]*@", value), key
    assert not of_kind(overlay, "Secret")
    for workload in workloads(overlay):
        for volume in workload["spec"]["template"]["spec"].get("volumes", ()):
            if "secret" in volume:
                assert volume["secret"]["secretName"].startswith("sluice-")
                assert volume["secret"]["defaultMode"] == 0o440
            if "projected" in volume:
                assert volume["projected"]["defaultMode"] == 0o440
                assert all(source["secret"]["name"].startswith("sluice-") for source in volume["projected"]["sources"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secret_files_lie_where_settings_look_for_them(overlay: str) -> None:
    for workload in of_kind(overlay, "Deployment"):
        mounts = {mount["name"]: mount["mountPath"] for mount in container_of(workload)["volumeMounts"]}
        assert mounts["secrets"] == str(SECRETS_DIR)
        volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
        sources = [source["secret"] for source in volumes["secrets"]["projected"]["sources"]]
        own, *others = sources
        assert own == {"name": f"sluice-{name_of(workload)}", "optional": True}
        assert others == ([{"name": "sluice-redis"}] if name_of(workload) == "router" else [])


def test_who_reaches_workers_by_address_knows_the_name_in_their_certificates() -> None:
    (certificate,) = [one for one in of_kind("production", "Certificate") if one["metadata"]["name"] == "sluice-worker"]
    for workload in of_kind("production", "Deployment"):
        name = name_of(workload)
        calls_workers = any(source == name and target == "worker" for source, target, _ in ARROWS)
        told = environment("production", workload).get(f"SLUICE_{name.upper()}_TLS_WORKER_NAME")
        assert told == ("worker" if calls_workers else None)
    assert "worker" in certificate["spec"]["dnsNames"]


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


def _with_components(folder: Path, *components: str) -> list[Object]:
    """The mock overlay with components it does not use itself."""

    def relative(path: Path) -> str:
        return os.path.relpath(path, folder)

    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(KUBERNETES / "overlays/mock")],
        "components": [relative(KUBERNETES / "components" / name) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return kustomize(folder)


def test_models_may_come_from_a_volume(tmp_path: Path) -> None:
    objects = _with_components(tmp_path, "model-volume")
    (worker,) = [one for one in objects if one["kind"] == "Deployment" and name_of(one) == "worker"]
    kubernetes_validate.validate(worker, kubernetes_validate.latest_version(), strict=True)
    volumes = {volume["name"]: volume for volume in worker["spec"]["template"]["spec"]["volumes"]}
    claim = {"claimName": "sluice-models", "readOnly": True}
    assert volumes["models"] == {"name": "models", "persistentVolumeClaim": claim}


def test_tokens_are_files_of_every_service(tmp_path: Path) -> None:
    objects = _with_components(tmp_path, "tokens")
    for workload in (one for one in objects if one["kind"] == "Deployment"):
        name = name_of(workload)
        kubernetes_validate.validate(workload, kubernetes_validate.latest_version(), strict=True)
        given = {one["name"]: one.get("value", "") for one in container_of(workload)["env"]}
        settings = {key.removeprefix(f"SLUICE_{name.upper()}_").lower(): value for key, value in given.items()}
        assert settings["peer_token_file"] == str(SECRETS_DIR / "token")
        assert settings.get("tokens_file") == (None if name == "gateway" else str(SECRETS_DIR / "tokens"))
        assert {"peer_token_file", "tokens_file"} & settings.keys() <= SETTINGS[name].model_fields.keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_rights_they_do_not_need(overlay: str) -> None:
    for workload in workloads(overlay):
        pod, container = workload["spec"]["template"]["spec"], container_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        mounted = {volume["name"] for volume in pod.get("volumes", ())} | {
            claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())
        }
        assert {mount["name"] for mount in container["volumeMounts"]} <= mounted


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_those_that_are_built(overlay: str) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE))
    for workload in workloads(overlay):
        if name_of(workload) == "redis":
            continue
        image, _, tag = container_of(workload)["image"].partition(":")
        assert tag not in ("", "latest")
        assert image.rpartition("/")[2].removeprefix("sluice-") in targets


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


def test_api_keys_are_a_file_and_open_the_way_to_redis_only(tmp_path: Path) -> None:
    objects = _with_components(tmp_path, "api-keys")
    assert _reachable(objects) == ARROWS_BY_OVERLAY["mock"] | {("gateway", "redis", 6379)}
    (settings,) = [one["data"] for one in objects if one["metadata"]["name"].startswith("sluice-gateway-")]
    assert settings["SLUICE_GATEWAY_API_KEYS_FILE"] == str(SECRETS_DIR / "api_keys")
    assert {"api_keys_file", "limits_redis_url"} <= GatewaySettings.model_fields.keys()
