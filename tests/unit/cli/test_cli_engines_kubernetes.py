"""Engines listed by Kubernetes: rules of endpoints, mistakes of the file, failures of the API server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.up.engines import kubernetes
from sluice.cli.up.engines.entries import BadRegistry, EngineEntry
from sluice.cli.up.engines.file import EngineFile
from tests.support.fakes.fake_kubernetes import FakeKubernetes, endpoint, endpoint_slice


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    with FakeKubernetes().serving() as fake:
        yield fake


def registry(api: FakeKubernetes, folder: Path, **fields: Any) -> EngineFile:
    file = folder / "engines.yaml"
    query = {"kubeconfig_file": str(api.kubeconfig(folder)), **(fields or {"service": "vllm"})}
    file.write_text(json.dumps({"kubernetes": query}))
    return EngineFile(file)


def problem(found: EngineFile) -> str:
    with pytest.raises(BadRegistry) as caught:
        found.entries()
    return str(caught.value)


def test_engines_of_kubernetes_with_all_fields_have_them(api: FakeKubernetes, tmp_path: Path) -> None:
    api.slices = [endpoint_slice([endpoint("10.0.0.2", "vllm-1"), endpoint("10.0.0.1", "vllm-0", ready=True)])]
    (tmp_path / "key").write_text("secret")
    fields = {"scheme": "https", "kv_events_port": 5557, "kv_replay_port": 5558, "block_size": 32}
    found = registry(
        api, tmp_path, service="vllm", namespace="serving", api_key_file="key", model="chat=/models/chat", **fields
    )
    first, second = found.entries()
    assert first == EngineEntry(
        "vllm-0",
        "https://10.0.0.1:8000",
        "tcp://10.0.0.1:5557",
        "tcp://10.0.0.1:5558",
        str(tmp_path / "key"),
        "chat=/models/chat",
        32,
    )
    assert (second.name, second.url) == ("vllm-1", "https://10.0.0.2:8000")
    assert "resourceVersion=0" in api.paths[0], "read from the API server's cache"


def test_engines_of_kubernetes_with_scheme_grpc_are_grpc_servers(api: FakeKubernetes, tmp_path: Path) -> None:
    api.slices = [endpoint_slice([endpoint("10.0.0.1", "vllm-0")])]
    (entry,) = registry(api, tmp_path, service="vllm", scheme="grpc").entries()
    assert entry == EngineEntry("vllm-0", "grpc://10.0.0.1:8000")


def test_engines_of_kubernetes_by_labels_are_those_of_matching_slices(api: FakeKubernetes, tmp_path: Path) -> None:
    other = endpoint_slice([endpoint("10.0.0.9", "other")])
    other["metadata"]["labels"] = {"app": "other"}
    api.slices = [other, endpoint_slice([endpoint("10.0.0.1", "vllm-0")])]
    assert [entry.name for entry in registry(api, tmp_path, selector="app=vllm").entries()] == ["vllm-0"]


def test_endpoints_that_are_not_ready_or_terminating_are_left_out(api: FakeKubernetes, tmp_path: Path) -> None:
    api.slices = [
        endpoint_slice(
            [
                endpoint("10.0.0.1", "starting", ready=False),
                endpoint("10.0.0.2", "ending", ready=True, terminating=True),
                endpoint("10.0.0.3", "unknown"),
                endpoint("10.0.0.4", "ready", ready=True, serving=True, terminating=False),
            ]
        )
    ]
    assert [entry.name for entry in registry(api, tmp_path).entries()] == ["ready", "unknown"]


def test_endpoint_in_several_slices_and_families_is_listed_once_by_ipv4(api: FakeKubernetes, tmp_path: Path) -> None:
    both = endpoint("10.0.0.1", "both")
    api.slices = [
        endpoint_slice([endpoint("fd00::1", "both"), endpoint("fd00::2", "only-6")], family="IPv6"),
        endpoint_slice([both]),
        endpoint_slice([both, endpoint("10.0.0.7")]),
    ]
    found = {entry.name: entry.url for entry in registry(api, tmp_path).entries()}
    assert found == {
        "at-10.0.0.7": "http://10.0.0.7:8000",
        "both": "http://10.0.0.1:8000",
        "only-6": "http://[fd00::2]:8000",
    }


@pytest.mark.parametrize(("port", "number"), [("http", 8000), ("8000", 8000), ("metrics", 9000), ("9000", 9000)])
def test_port_of_several_is_chosen_by_name_or_number(
    api: FakeKubernetes, tmp_path: Path, port: str, number: int
) -> None:
    more = [{"name": "metrics", "port": 9000}, {"name": "udp", "port": 53, "protocol": "UDP"}]
    api.slices = [endpoint_slice([endpoint("10.0.0.1", "a")], more_ports=more)]
    (entry,) = registry(api, tmp_path, service="vllm", port=port).entries()
    assert entry.url == f"http://10.0.0.1:{number}"


def test_port_that_is_ambiguous_or_absent_is_rejected_with_the_ports(api: FakeKubernetes, tmp_path: Path) -> None:
    api.slices = [endpoint_slice([endpoint("10.0.0.1", "a")], more_ports=[{"name": "metrics", "port": 9000}])]
    expected = "set port; the slices have http (8000), metrics (9000)."
    assert problem(registry(api, tmp_path)) == f"Kubernetes, service vllm: {expected}"
    wrong = registry(api, tmp_path, service="vllm", port="web")
    assert "there is no port web; the slices have http (8000), metrics (9000)." in problem(wrong)


def test_service_without_pods_has_no_engines_and_one_without_slices_is_reported(
    api: FakeKubernetes, tmp_path: Path
) -> None:
    api.slices = [endpoint_slice([])]
    found = registry(api, tmp_path)
    assert list(found.entries()) == []
    api.slices = []
    assert problem(found).startswith("Kubernetes, service vllm in namespace serving: no EndpointSlice matches; check")


def test_too_many_endpoints_are_rejected(api: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "MAX_ENGINES", 1)
    api.slices = [endpoint_slice([endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")])]
    assert "has more than 1 endpoints" in problem(registry(api, tmp_path))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, "the API server rejects the credentials (401)."),
        (403, "allow the verb list on endpointslices of the API group discovery.k8s.io in a Role."),
        (500, "the API server answered with status 500."),
    ],
)
def test_refusal_of_the_api_server_names_what_to_do(
    api: FakeKubernetes, tmp_path: Path, status: int, expected: str
) -> None:
    api.status = status
    found = problem(registry(api, tmp_path))
    assert found.endswith(expected)
    assert "secret detail" not in found


def test_api_server_that_is_away_hangs_or_returns_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "READ_S", 0.3)
    api = FakeKubernetes([endpoint_slice([endpoint("10.0.0.1", "a")])])
    with api.serving():
        found = registry(api, tmp_path)
        assert len(found.entries()) == 1
        api.hangs = True
        assert "the API server cannot be reached (ReadTimeoutError)" in problem(found)
        api.hangs = False
        assert len(found.entries()) == 1
    assert "the API server cannot be reached" in problem(found)
    with api.serving():
        assert len(found.entries()) == 1


def test_changed_query_is_used_at_once(api: FakeKubernetes, tmp_path: Path) -> None:
    api.slices = [endpoint_slice([endpoint("10.0.0.1", "a")])]
    found = registry(api, tmp_path)
    assert found.entries()[0].url == "http://10.0.0.1:8000"
    registry(api, tmp_path, service="vllm", scheme="https")
    assert found.entries()[0].url == "https://10.0.0.1:8000"


def test_missing_client_names_the_extra(api: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    assert "install sluice-llm[kubernetes]" in problem(registry(api, tmp_path))


def test_absent_configuration_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("{}")
    file = tmp_path / "engines.yaml"
    file.write_text("kubernetes: {service: vllm, kubeconfig_file: empty}")
    assert "the configuration of Kubernetes is invalid" in problem(EngineFile(file))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kubernetes: vllm\n", ":1: kubernetes must be a mapping with service or selector."),
        ("kubernetes:\n  port: http\n", ":2: kubernetes needs either service or selector."),
        ("kubernetes:\n  service: a\n  selector: b=c\n", ":2: kubernetes needs either service or selector."),
        ("kubernetes:\n  services: a\n", ":2: services is unknown; use service, selector, namespace, port, "),
        ("kubernetes:\n  service: A/b\n", ":2: service is 'A/b'; expected a name of Kubernetes."),
        ("kubernetes:\n  service: a\n  port: '70000'\n", ":3: port is '70000'; it must be between 1 and 65535."),
        (
            "kubernetes:\n  service: a\n  scheme: grpc\n  kv_events_port: 5557\n",
            ":2: kv_events_port has no meaning with scheme: grpc.",
        ),
        ("kubernetes:\n  service: a\n  scheme: ftp\n", ":3: scheme is 'ftp'; use http, https, grpc."),
        ("kubernetes:\n  service: a\n  kv_replay_port: 5558\n", ":2: kv_replay_port needs kv_events_port."),
        ("kubernetes:\n  service: a\n  kv_events_port: 5557x\n", ":3: kv_events_port must be a number."),
        ("kubernetes:\n  service: a\n  kubeconfig_file: none\n", ":3: kubeconfig_file 'none' is not a file."),
        ("kubernetes: {}\nengines: []\n", ":1: the file must be a list of engines, or a mapping with kubernetes."),
    ],
)
def test_query_with_a_mistake_names_line_and_field(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(text)
    assert problem(EngineFile(file)).removeprefix(str(file)).startswith(expected)
