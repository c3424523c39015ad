"""What the Kubernetes overlays render to."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.settings.service import ServiceSettings
from services.gateway.settings import GatewaySettings
from services.postprocess.settings import PostprocessSettings
from services.preprocess.settings import PreprocessSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.support.repository import ROOT

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

Object = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Object]:
    return kustomize(KUBERNETES / "overlays" / overlay)


def kustomize(folder: Path) -> list[Object]:
    """What `kubectl kustomize` makes of a folder; the test fails where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.fail("The overlays cannot be checked without kubectl 1.27 or newer on PATH: install it.", pytrace=False)
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


def with_components(folder: Path, *components: str) -> list[Object]:
    """The mock overlay with components it does not use itself."""

    def relative(path: Path) -> str:
        return os.path.relpath(path, folder)

    folder.mkdir(exist_ok=True)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(KUBERNETES / "overlays/mock")],
        "components": [relative(KUBERNETES / "components" / name) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return kustomize(folder)
