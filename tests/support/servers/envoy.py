"""A real Envoy for tests and benchmarks: one process with an ext_proc filter, on free ports of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from services.common.net.addresses import host_port
from services.common.net.ports import free_port
from tests.support.repository import ROOT

VERSION = "1.40.0"
DEPLOYED = ROOT / "deploy/compose/envoy/envoy.yaml"
DESTINATION = "x-gateway-destination-endpoint"
SUBSET_HEADER, SUBSET_LIST_HEADER = "x-test-subset", "x-test-subset-list"
BODY_LIMIT = 64 << 20


def envoy_binary(version: str = VERSION) -> Path:
    """The Envoy to run; fails when `scripts/envoy.sh` has not installed it."""
    found = sorted((ROOT / "build" / "envoy" / version).glob("lib/python*/site-packages/envoy/_bin/envoy"))
    if not found:
        raise AssertionError(f"Envoy {version} is not installed: run scripts/envoy.sh {version}")
    return found[0]


class Envoy:
    """One Envoy that asks pickers for the endpoint of every request.

    Args:
        folder: for its configuration and log.
        pickers: host:port of the pickers; without any, requests are spread over the endpoints without asking.
        endpoints: host:port of the servers that requests may go to.
        fail_open: send requests to any endpoint while no picker responds, instead of rejecting them.
        original_dst: connect to the endpoint in the header, instead of choosing it among known ones by metadata.
        deployed: take the configuration of deploy/compose, and change only its addresses.
    """

    def __init__(
        self,
        folder: Path,
        pickers: Sequence[str],
        endpoints: Sequence[str],
        fail_open: bool = False,
        original_dst: bool = False,
        version: str = VERSION,
        threads: int = 1,
        deployed: bool = False,
    ) -> None:
        self._binary = envoy_binary(version)
        self._folder = folder
        self._threads = threads
        self.port, self.admin = free_port(), free_port()
        self._pickers, self._fail_open, self._original_dst = pickers, fail_open, original_dst
        self._endpoints = endpoints
        self._deployed = deployed
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts and waits until its listener is ready."""
        path = self._folder / f"envoy-{self.port}.json"
        path.write_text(json.dumps(self.configuration()))
        command = [str(self._binary), "--config-path", str(path), "--concurrency", str(self._threads)]
        command += ["--disable-hot-restart", "--log-level", "warning"]
        # Its own random base id: several run on this machine.
        with (self._folder / f"envoy-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "ENVOY_UID": "0"})
        deadline = time.monotonic() + 30
        while not self._ready():
            assert self._process.poll() is None, f"envoy ended at once: {self.log()[-2000:]}"
            assert time.monotonic() < deadline, "envoy did not become ready in 30 s"
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def log(self) -> str:
        """What it has logged."""
        return (self._folder / f"envoy-{self.port}.log").read_text()

    def counters(self, part: str) -> dict[str, int]:
        """Its counters whose names contain `part`."""
        text = self._admin(f"/stats?filter={part}")
        pairs = (line.rsplit(":", 1) for line in text.splitlines() if ":" in line)
        return {name: int(number) for name, number in pairs if number.strip().isdigit()}

    def _ready(self) -> bool:
        try:
            return self._admin("/ready").strip() == "LIVE"
        except (OSError, urllib.error.HTTPError):
            return False

    def _admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def configuration(self) -> dict[str, Any]:
        """Returns its configuration."""
        admin = {"address": _socket("127.0.0.1", self.admin)}
        if self._deployed:
            return {"admin": admin, "static_resources": self._deployed_resources()}
        clusters = [self._upstream()]
        if self._pickers:
            clusters.append(_picker_cluster(self._pickers))
        return {
            "admin": admin,
            "static_resources": {"listeners": [self._listener()], "clusters": clusters},
        }

    def _deployed_resources(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(DEPLOYED.read_text())["static_resources"]
        (listener,) = found["listeners"]
        listener["address"] = _socket("127.0.0.1", self.port)
        addresses = {"gateways": self._endpoints, "pickers": self._pickers}
        for cluster in found["clusters"]:
            cluster["load_assignment"] = _assignment(cluster["name"], addresses[cluster["name"]])
        return found

    def _listener(self) -> dict[str, Any]:
        filters = [_subset_filter(), self._ext_proc()] if self._pickers else []
        filters.append(_typed("envoy.filters.http.router", "envoy.extensions.filters.http.router.v3.Router"))
        manager = _typed(
            "envoy.filters.network.http_connection_manager",
            "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            stat_prefix="in",
            codec_type="AUTO",
            stream_idle_timeout="0s",
            http_protocol_options={"enable_trailers": True},
            route_config={
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "endpoints", "timeout": "0s"}}],
                    }
                ]
            },
            http_filters=filters,
        )
        return {
            "name": "in",
            "address": _socket("127.0.0.1", self.port),
            "filter_chains": [{"filters": [manager]}],
            "per_connection_buffer_limit_bytes": 1 << 20,
        }

    def _ext_proc(self) -> dict[str, Any]:
        return _typed(
            "envoy.filters.http.ext_proc",
            "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            grpc_service={"envoy_grpc": {"cluster_name": "pickers"}, "timeout": "600s"},
            failure_mode_allow=self._fail_open,
            message_timeout="600s",
            processing_mode={
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "response_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_trailer_mode": "SEND",
            },
            response_attributes=["upstream.address"],
            metadata_options={
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
            mutation_rules={"allow_all_routing": True, "allow_envoy": True},
        )

    def _upstream(self) -> dict[str, Any]:
        cluster: dict[str, Any] = {
            "name": "endpoints",
            "connect_timeout": "2s",
            "circuit_breakers": {"thresholds": [_unbounded()]},
        }
        if self._original_dst and self._pickers:
            cluster |= {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
            cluster["original_dst_lb_config"] = {"use_http_header": True, "http_header_name": DESTINATION}
            return cluster
        cluster |= {"type": "STATIC", "load_assignment": _assignment("endpoints", self._endpoints)}
        if self._pickers:
            name = "envoy.extensions.load_balancing_policies"
            round_robin = _typed(f"{name}.round_robin", f"{name}.round_robin.v3.RoundRobin")
            override = _typed(
                f"{name}.override_host",
                f"{name}.override_host.v3.OverrideHost",
                override_host_sources=[{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
                fallback_policy={"policies": [{"typed_extension_config": round_robin}]},
            )
            cluster["load_balancing_policy"] = {"policies": [{"typed_extension_config": override}]}
        return cluster


def _picker_cluster(pickers: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
    protocol = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    check = {
        "timeout": "1s",
        "interval": "0.2s",
        "no_traffic_interval": "0.2s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
    }
    return {
        "name": "pickers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment("pickers", pickers),
        "typed_extension_protocol_options": {protocol: {"@type": f"type.googleapis.com/{protocol}", **options}},
        "health_checks": [check],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": {"thresholds": [_unbounded()]},
    }


def _subset_filter() -> dict[str, Any]:
    """Returns a filter that turns test headers into the subset hint: a string, or a serialized list in base64."""

    def rule(header: str, kind: str) -> dict[str, Any]:
        value = {"metadata_namespace": "envoy.lb.subset_hint", "key": f"{DESTINATION}-subset", "type": kind}
        if kind == "PROTOBUF_VALUE":
            value["encode"] = "BASE64"
        return {"header": header, "on_header_present": value, "remove": True}

    return _typed(
        "envoy.filters.http.header_to_metadata",
        "envoy.extensions.filters.http.header_to_metadata.v3.Config",
        request_rules=[rule(SUBSET_HEADER, "STRING"), rule(SUBSET_LIST_HEADER, "PROTOBUF_VALUE")],
    )


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/{kind}", **fields}}


def _unbounded() -> dict[str, int]:
    most = 1_000_000
    return {"max_connections": most, "max_pending_requests": most, "max_requests": most, "max_retries": most}


def _assignment(cluster: str, addresses: Sequence[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _socket(*_parsed(each))}} for each in addresses]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}


def _parsed(address: str) -> tuple[str, int]:
    found = host_port(address)
    assert found is not None, address
    return found


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
