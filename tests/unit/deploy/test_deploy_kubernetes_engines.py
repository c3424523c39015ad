"""The component `engines`: the pod that follows running servers, its right and its list."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from services.common.rpc.health import LIVE
from services.worker.settings import WorkerSettings
from sluice.cli.commands import app
from sluice.cli.up.engines.entries import MAX_ENGINES, EngineEntry
from sluice.cli.up.engines.file import EngineFile
from sluice.cli.up.engines.follow import KILL_AFTER_DRAIN_S, FollowOptions
from sluice.cli.up.engines.slice_query import SliceQuery
from tests.support.oracles.kustomized import container_of, name_of, ports_of, with_components
from tests.support.repository import ROOT


def test_engines_component_runs_the_follower_with_one_right(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "engines")
    of = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    engines = of["Deployment", "engines"]
    for one in objects:
        if "engines" in one["metadata"]["name"]:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    pod, container = engines["spec"]["template"]["spec"], container_of(engines)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/models"}
    # A second pod would register the same workers.
    assert (engines["spec"]["replicas"], engines["spec"]["strategy"]) == (1, {"type": "Recreate"})

    account = pod["serviceAccountName"]
    assert account not in {
        one["spec"]["template"]["spec"].get("serviceAccountName")
        for one in objects
        if one["kind"] == "Deployment" and one is not engines
    }
    (binding,) = [one for one in objects if one["kind"] == "RoleBinding"]
    assert [(one["kind"], one["name"]) for one in binding["subjects"]] == [("ServiceAccount", account)]
    role = of["Role", binding["roleRef"]["name"]]
    assert role["rules"] == [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}]
    assert not [one for one in objects if one["kind"] in ("ClusterRole", "ClusterRoleBinding")]


def test_engines_component_passes_a_valid_list_and_valid_flags(tmp_path: Path) -> None:
    objects = with_components(tmp_path / "kustomized", "engines")
    (engines,) = [one for one in objects if one["kind"] == "Deployment" and name_of(one) == "engines"]
    container = container_of(engines)
    maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    (mounted,) = [one for one in engines["spec"]["template"]["spec"]["volumes"] if one["name"] == "list"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "list"]
    flags = dict(argument.split("=", 1) for argument in container["args"])
    folder, _, name = flags["--engines"].rpartition("/")
    assert folder == mount["mountPath"]
    queries: list[SliceQuery] = []

    class Nothing:
        def entries(self) -> tuple[EngineEntry, ...]:
            return ()

    def listed(query: SliceQuery) -> Nothing:
        queries.append(query)
        return Nothing()

    file = tmp_path / "engines.yaml"
    file.write_text(maps[mounted["configMap"]["name"]][name])
    assert EngineFile(file, listed).entries() == ()
    assert queries[0].label_selector == "sluice-engine=true"

    (source,) = container["envFrom"]
    variables = maps[source["configMapRef"]["name"]]
    known = {f"SLUICE_WORKER_{field.upper()}" for field in WorkerSettings.model_fields}
    assert {key for key in variables if key.startswith("SLUICE_")} <= known
    entrypoint = dockerfile_entrypoint("engines")
    assert entrypoint[:2] == ["sluice", "follow"]
    given = {**dict(zip(entrypoint[2::2], entrypoint[3::2], strict=True)), **flags}
    commands = get_command(app)
    assert isinstance(commands, TyperGroup)
    offered = {option for one in commands.commands["follow"].params for option in one.opts}
    assert given.keys() <= offered
    options = FollowOptions(
        file,
        variables["SLUICE_WORKER_ROUTERS"],
        given["--host"],
        int(given["--base-port"]),
        given["--health-listen"],
        float(given["--drain-s"]),
    )
    assert options.health_listen == f"{options.host}:{ports_of(engines)['grpc']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports_of(engines)["grpc"]
    assert container["livenessProbe"]["grpc"]["service"] == LIVE
    grace_s = engines["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > options.drain_s + KILL_AFTER_DRAIN_S
    opened = [
        (port["port"], port["endPort"])
        for one in objects
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] in ("engines", "engines-callers")
        for rule in (*one["spec"].get("ingress", ()), *one["spec"].get("egress", ()))
        for port in rule.get("ports", ())
        if "endPort" in port
    ]
    assert opened == [(options.base_port, options.base_port + MAX_ENGINES - 1)] * 2


def test_engines_component_with_certificates_tokens_and_a_volume_of_models_has_those_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = with_components(tmp_path, "engines", "tls", "tokens", "model-volume")
    (engines,) = [one for one in objects if one["kind"] == "Deployment" and name_of(one) == "engines"]
    kubernetes_validate.validate(engines, kubernetes_validate.latest_version(), strict=True)
    volumes = {volume["name"]: volume for volume in engines["spec"]["template"]["spec"]["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == "sluice-worker-tls"
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "sluice-models", "readOnly": True}
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(engines)["volumeMounts"]}
    for variable in container_of(engines)["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    settings = WorkerSettings.load([])
    assert settings.tls_require_client_cert
    assert {str(file.parent) for file in (settings.tls_cert, settings.tls_key, settings.tls_ca) if file} == {
        mounts["tls"]
    }
    assert settings.peer_token_file is not None
    assert settings.tokens_file is not None
    assert str(settings.peer_token_file.parent) == str(settings.tokens_file.parent) == mounts["secrets"]


def dockerfile_entrypoint(target: str) -> list[str]:
    """The command of an image that is built."""
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    (stage,) = re.findall(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    (words,) = re.findall(r"^ENTRYPOINT (\[.*\])$", stage, re.MULTILINE)
    found: list[str] = yaml.safe_load(words)
    return found
