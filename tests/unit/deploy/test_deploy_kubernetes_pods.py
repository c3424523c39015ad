"""The pods of the overlays: probes, settings, secrets, rights, images."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from services.common.rpc.health import LIVE
from services.common.settings.service import SECRETS_DIR, GrpcServiceSettings, TlsSettings
from sluice.cli import tokens as made_tokens
from tests.support.oracles.kustomized import (
    KUBERNETES,
    OVERLAYS,
    SETTINGS,
    Object,
    container_of,
    environment,
    matches,
    name_of,
    of_kind,
    pod_labels,
    ports_of,
    with_components,
    workloads,
)
from tests.support.repository import ROOT


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
                assert probe["httpGet"]["path"] == ("/ready?workers=0" if kind == "readinessProbe" else "/health")
                assert probe["httpGet"]["port"] in ports_of(workload)
            elif "grpc" in probe:
                assert probe["grpc"]["port"] == ports_of(workload)["grpc"]
                assert probe["grpc"].get("service", "") == (LIVE if kind == "livenessProbe" else "")
            else:
                command = probe["exec"]["command"]
                assert command[:3] == ["python3" if name == "worker" else "python", "-m", "services.common.rpc.probe"]
                assert command[3:6] == [f"127.0.0.1:{ports_of(workload)['grpc']}", "--service", name]
                assert ("--live" in command) is (kind == "livenessProbe")
                assert probe["timeoutSeconds"] > 3  # the probe's own limit, and a Python to start
        uses_tls = bool(environment(overlay, workload).get(f"SLUICE_{name.upper()}_TLS_CERT"))
        assert name == "gateway" or uses_tls is ("exec" in container["readinessProbe"])


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
                    # Files of Redis' TLS must be there when a service starts.
                    patched.setenv(key, __file__ if "_REDIS_" in key and key.endswith("_FILE") else value)
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
def test_gateway_pod_stops_after_its_endpoint_is_removed(overlay: str) -> None:
    (gateway,) = [one for one in workloads(overlay) if name_of(one) == "gateway"]
    assert before_stop_s(gateway) >= 5


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_stands_in_a_config_map_and_every_secret_is_named(overlay: str) -> None:
    for item in of_kind(overlay, "ConfigMap"):
        for key, value in item["data"].items():
            names_a_file = key.endswith("_FILE")
            assert names_a_file or not re.search("PASSWORD|TOKEN|SECRET|API_KEY", key), key
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
        assert others == of_redis(name_of(workload), overlay)


def of_redis(name: str, overlay: str) -> list[Object]:
    """The Secret with the password of Redis, for those who call it."""
    if name == "router":
        return [{"name": "sluice-redis"}]
    if name == "gateway" and overlay != "mock":
        as_own = {"key": "sluice_router_redis_password", "path": "sluice_gateway_redis_password"}
        return [{"name": "sluice-redis", "items": [as_own]}]
    return []


def test_tokens_are_files_of_every_service(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "tokens")
    for workload in (one for one in objects if one["kind"] == "Deployment"):
        name = name_of(workload)
        kubernetes_validate.validate(workload, kubernetes_validate.latest_version(), strict=True)
        given = {one["name"]: one.get("value", "") for one in container_of(workload)["env"]}
        settings = {key.removeprefix(f"SLUICE_{name.upper()}_").lower(): value for key, value in given.items()}
        assert settings["peer_token_file"] == str(SECRETS_DIR / made_tokens.SHOWN)
        accepted = None if name == "gateway" else str(SECRETS_DIR / made_tokens.ACCEPTED)
        assert settings.get("tokens_file") == accepted
        assert {"peer_token_file", "tokens_file"} & settings.keys() <= SETTINGS[name].model_fields.keys()


def secrets_of(workload: Object) -> set[str]:
    """Names of the Secrets that a pod mounts, or takes variables from."""
    names = set()
    for volume in workload["spec"]["template"]["spec"].get("volumes", ()):
        names |= {volume["secret"]["secretName"]} if "secret" in volume else set()
        names |= {source["secret"]["name"] for source in volume.get("projected", {}).get("sources", ())}
    container = container_of(workload)
    assert all("secretRef" not in source for source in container.get("envFrom", ()))
    assert all("secretKeyRef" not in variable.get("valueFrom", {}) for variable in container.get("env", ()))
    return names


def test_no_pod_mounts_another_services_tokens(tmp_path: Path) -> None:
    with_tokens = [one for one in with_components(tmp_path / "kustomized", "tokens") if one["kind"] == "Deployment"]
    for workload in [*with_tokens, *(one for overlay in OVERLAYS for one in of_kind(overlay, "Deployment"))]:
        name = name_of(workload)
        others = {f"sluice-{other}" for other in SETTINGS if other != name}
        assert f"sluice-{name}" in secrets_of(workload)
        assert not secrets_of(workload) & {*others, *(f"{other}-tls" for other in others)}


def test_folder_of_a_service_holds_the_tokens_that_it_shows_and_digests(tmp_path: Path) -> None:
    """What becomes the Secret of each service, as docs/kubernetes.md says."""
    made_tokens.make(tmp_path, made_tokens.Options())
    assert {path.name for path in tmp_path.iterdir()} == {*SETTINGS, "operator"}
    shown = {
        path.parent.name: {line.split()[0] for line in path.read_text().splitlines()}
        for path in tmp_path.glob(f"*/{made_tokens.SHOWN}")
    }
    for name, folder in ((path.name, path) for path in tmp_path.iterdir()):
        words = {word for file in folder.iterdir() for word in file.read_text().split()}
        assert all(not tokens & words for other, tokens in shown.items() if other != name)
        assert shown[name] <= words
    documented = (ROOT / "docs" / "kubernetes.md").read_text()
    assert "sluice tokens tokens" in documented
    assert "--from-file=tokens/$service" in documented


def test_certificates_name_the_service_that_shows_them() -> None:
    for certificate in of_kind("guarded", "Certificate"):
        name = certificate["metadata"]["name"].removeprefix("sluice-")
        given = certificate["spec"].get("uris", [])
        assert given == ([f"spiffe://{TlsSettings().tls_trust_domain}/{name}"] if name in SETTINGS else [])


def test_redis_asks_for_a_password() -> None:
    for overlay in ("mock", "guarded"):
        (redis,) = [one for one in workloads(overlay) if name_of(one) == "redis"]
        script = container_of(redis)["args"][0]
        assert "printf 'requirepass '; cat /run/secrets/sluice_router_redis_password" in script
        assert "protected-mode" not in script
        assert "sluice-redis" in secrets_of(redis)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_reflection_is_left_to_its_default_which_is_off_in_pods(overlay: str) -> None:
    for workload in workloads(overlay):
        assert not any(name.endswith("_REFLECTION") for name in environment(overlay, workload))
    assert all(
        settings.model_fields["reflection"].default is None
        for settings in SETTINGS.values()
        if issubclass(settings, GrpcServiceSettings)
    )


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
        # The image of a worker on accelerators is called after its engine.
        built = image.rpartition("/")[2].removeprefix("sluice-")
        assert engine_of_image(built) in ("", "vllm", "sglang")
        assert built in targets or built.replace("worker-", "engine-") in targets


def engine_of_image(built: str) -> str:
    """The engine that an image such as `worker-vllm` or `preprocess-vllm` brings along; empty for none."""
    return built.partition("-")[2]


def model_folders() -> list[Path]:
    return sorted((KUBERNETES / "overlays").glob("*/models/*/kustomization.yaml"))


@pytest.mark.parametrize("file", model_folders(), ids=lambda file: f"{file.parts[-4]}-{file.parts[-2]}")
def test_model_folder_names_the_image_of_its_engine(file: Path) -> None:
    """Else another engine in a copied folder keeps the image of the first one."""
    folder = yaml.safe_load(file.read_text())
    (image,) = folder["images"]
    assert image["name"] == "sluice-worker"
    settings = dict(line.split("=", 1) for map_ in folder["configMapGenerator"] for line in map_["literals"])
    engine = settings["SLUICE_WORKER_ENGINE"]
    built = image.get("newName", image["name"]).rpartition("/")[2].removeprefix("sluice-")
    assert engine_of_image(built) == ("" if engine == "mock" else engine)
    overlay = yaml.safe_load(file.parents[2].joinpath("kustomization.yaml").read_text())
    assert "sluice-worker" not in [one["name"] for one in overlay["images"]]


def test_hub_token_is_a_file_that_the_hubs_client_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = with_components(tmp_path / "overlay", "model-download", "hub-token")
    (worker,) = [one for one in objects if one["kind"] == "Deployment" and name_of(one) == "worker"]
    kubernetes_validate.validate(worker, kubernetes_validate.latest_version(), strict=True)
    given = {one["name"]: one.get("value") for one in container_of(worker)["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(worker)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in worker["spec"]["template"]["spec"]["volumes"]}
    assert given["HF_TOKEN_PATH"] == f"{mounts['hub-token']}/hf_token"
    assert volumes["hub-token"]["secret"]["secretName"] == "sluice-hub"
    assert not any("TOKEN" in name and name != "HF_TOKEN_PATH" for name in given)

    token = tmp_path / "hf_token"
    token.write_text("hf_secret\n")
    code = "import huggingface_hub; print(huggingface_hub.get_token())"
    environment = {"HF_TOKEN_PATH": str(token), "HOME": str(tmp_path)}
    read = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert read.stdout.strip() == "hf_secret", read.stderr


@pytest.mark.parametrize("flag", ["vllm-processing", "sglang-processing", "native-framework-processing"])
def test_processing_component_sets_the_flag_and_the_image_of_both_services(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = with_components(tmp_path, flag)
    maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    engine = flag.removesuffix("-processing") if flag != "native-framework-processing" else ""
    for name in ("preprocess", "postprocess"):
        (workload,) = [one for one in objects if one["kind"] == "Deployment" and name_of(one) == name]
        kubernetes_validate.validate(workload, kubernetes_validate.latest_version(), strict=True)
        (source,) = container_of(workload)["envFrom"]
        with monkeypatch.context() as patched:
            for key, value in maps[source["configMapRef"]["name"]].items():
                patched.setenv(key, value)
            loaded = SETTINGS[name].load([])
        flags = {field for field in SETTINGS[name].model_fields if field.endswith("_processing")}
        assert {field for field in flags if getattr(loaded, field)} == {flag.replace("-", "_")}
        image = container_of(workload)["image"]
        assert image == f"sluice-{name}{f'-{engine}' if engine else ''}:0.1.0"
    others = [one for one in objects if one["kind"] == "ConfigMap" and "router" in one["metadata"]["name"]]
    assert not any("PROCESSING" in key for one in others for key in one["data"])


def test_inference_gateway_component_makes_routers_the_picker_of_direct_gateways(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "inference-gateway")
    kinds = {one["kind"]: one for one in objects}
    reference = kinds["InferencePool"]["spec"]["endpointPickerRef"]
    assert reference["failureMode"] == "FailClose"
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    ports = {one["port"]: one for one in services[reference["name"]]["ports"]}
    assert ports[reference["port"]["number"]]["appProtocol"] == "kubernetes.io/h2c"
    workloads_of = {name_of(one): one for one in objects if one["kind"] == "Deployment"}
    router, gateway = workloads_of["router"], workloads_of["gateway"]
    assert {"picker", "picker-health"} <= ports_of(router).keys()
    assert {one["targetPort"] for one in ports.values()} <= ports_of(router).keys()
    assert matches(kinds["InferencePool"]["spec"]["selector"], pod_labels(gateway))
    (target,) = kinds["InferencePool"]["spec"]["targetPorts"]
    assert ports_of(gateway)["http"] == target["number"]
    maps = {one["metadata"]["name"].rpartition("-")[0]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    given = maps["sluice-router"]
    host, _, port = given["SLUICE_ROUTER_PICKER_GATEWAYS"].partition(":")
    assert services[host]["clusterIP"] == "None"
    assert int(port) == target["number"]
    assert given["SLUICE_ROUTER_PICKER_LISTEN"].endswith(f":{reference['port']['number']}")
    assert maps["sluice-gateway"]["SLUICE_GATEWAY_PRESET"] == "direct_execution"
    for one in (router, gateway):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    assert "engines" in workloads_of
    (backend,) = kinds["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", kinds["InferencePool"]["metadata"]["name"])
    # A data plane sends requests to a picker until it knows that its pod stops.
    grace_s = router["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert before_stop_s(router) >= 5
    assert grace_s > before_stop_s(router) + float(given["SLUICE_ROUTER_DRAIN_S"]) + 5
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    of_router = [spec for spec in policies if matches(spec["podSelector"], pod_labels(router))]
    allowed = [rule for spec in of_router for rule in spec.get("ingress", ())]
    (reach,) = [rule["from"] for rule in allowed if {"port": "picker"} in rule["ports"]]
    assert reach == [{"namespaceSelector": {}}], "the data plane's namespace is known to the overlay only"


@pytest.mark.parametrize("others", [(), ("tls",)])
def test_picker_tls_component_serves_the_pickers_own_certificate(tmp_path: Path, others: tuple[str, ...]) -> None:
    objects = with_components(tmp_path, *others, "inference-gateway", "picker-tls")
    (router,) = [one for one in objects if one["kind"] == "Deployment" and name_of(one) == "router"]
    kubernetes_validate.validate(router, kubernetes_validate.latest_version(), strict=True)
    container = container_of(router)
    given = {one["name"]: one.get("value", "") for one in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    secrets = {
        volume["name"]: volume["secret"]["secretName"]
        for volume in router["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    }
    for name, file in (("PICKER_TLS_CERT", "tls.crt"), ("PICKER_TLS_KEY", "tls.key")):
        assert name.lower() in SETTINGS["router"].model_fields
        assert given[f"SLUICE_ROUTER_{name}"] == f"{mounts['picker-tls']}/{file}"
    assert secrets["picker-tls"] == "sluice-picker-tls"
    assert secrets.get("tls") == ("sluice-router-tls" if others else None)
    (service,) = [one for one in objects if one["kind"] == "Service" and one["metadata"]["name"] == "picker"]
    assert {port["appProtocol"] for port in service["spec"]["ports"]} == {"http2"}
