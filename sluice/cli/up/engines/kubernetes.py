"""Engines listed by Kubernetes: the ready endpoints of EndpointSlices, through the official client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from services.common.net.addresses import join
from sluice.cli.up.engines.entries import MAX_ENGINES, BadRegistry, EngineEntry, NothingListed, RegistryUnavailable
from sluice.cli.up.engines.slice_query import SliceQuery

CONNECT_S, READ_S = 2.0, 5.0
FAMILIES = ("IPv4", "IPv6")
"""The address types that are read; an endpoint that has both is reached by the first."""
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class EndpointSlices:
    """Lists EndpointSlices (discovery.k8s.io/v1) at each call.

    The list comes from the API server's watch cache, so that it costs the cluster's store nothing.

    Args:
        query: which endpoints are engines.
    """

    def __init__(self, query: SliceQuery) -> None:
        self._query = query
        self._api: Any = None
        self._namespace = query.namespace

    def entries(self) -> Sequence[EngineEntry]:
        """Returns the ready servers, by name; raises BadRegistry as EngineRegistry does."""
        found = engines_of(self._slices(), self._query)
        if len(found) > MAX_ENGINES:
            raise BadRegistry(f"{self._what} has more than {MAX_ENGINES} endpoints.")
        return found

    @property
    def _what(self) -> str:
        return f"Kubernetes, {self._query} in namespace {self._namespace}:"

    def _slices(self) -> Sequence[Any]:
        try:
            from kubernetes.client import ApiException, DiscoveryV1Api
            from kubernetes.config import ConfigException
            from urllib3.exceptions import HTTPError
        except ImportError as error:
            raise BadRegistry(
                "engines listed by Kubernetes need its client; install sluice-llm[kubernetes]."
            ) from error
        try:
            if self._api is None:
                client, self._namespace = _configured(self._query)
                self._api = DiscoveryV1Api(client)
            answer = self._api.list_namespaced_endpoint_slice(
                self._namespace,
                label_selector=self._query.label_selector,
                resource_version="0",
                _request_timeout=(CONNECT_S, READ_S),
            )
        except ConfigException as error:
            raise BadRegistry(f"the configuration of Kubernetes is invalid: {str(error).rstrip('.')}.") from error
        except ApiException as error:
            raise RegistryUnavailable(f"{self._what} {_refusal(error.status or 0)}") from error
        except (HTTPError, OSError) as error:
            self._api = None  # certificates and tokens are read again
            raise RegistryUnavailable(
                f"{self._what} the API server cannot be reached ({type(error).__name__})."
            ) from error
        except ValueError as error:
            raise RegistryUnavailable(
                f"{self._what} the API server's response is not a list of EndpointSlices."
            ) from error
        if not answer.items:
            raise NothingListed(f"{self._what} no EndpointSlice matches; check the name, the labels and the namespace.")
        slices: Sequence[Any] = answer.items
        return slices


def engines_of(slices: Sequence[Any], query: SliceQuery) -> list[EngineEntry]:
    """Returns one engine for each ready endpoint, sorted by name.

    An endpoint may be listed in several slices while Kubernetes moves it, and once for each address family.

    Args:
        slices: V1EndpointSlice objects.

    Raises:
        BadRegistry: a slice lacks the port, or has several and the query names none.
    """
    found: dict[str, EngineEntry] = {}
    for family in FAMILIES:
        for one in slices:
            if one.address_type == family:
                for name, address in _ready(one.endpoints or ()):
                    if name not in found:
                        found[name] = _entry(name, address, _port(one, query), query)
    return [found[name] for name in sorted(found)]


def _ready(endpoints: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Returns names and addresses of the endpoints that may receive requests."""
    for endpoint in endpoints:
        conditions = endpoint.conditions
        ready = conditions is None or (conditions.ready is not False and not conditions.terminating)
        if ready and endpoint.addresses:
            address = endpoint.addresses[0]
            target = endpoint.target_ref
            yield (target.name if target and target.name else f"at-{address.replace(':', '.')}"), address


def _port(one: Any, query: SliceQuery) -> int:
    ports = {port.name or "": port.port for port in one.ports or () if port.port and port.protocol in (None, "TCP")}
    names = ", ".join(sorted(f"{name or 'unnamed'} ({number})" for name, number in ports.items())) or "none"
    if query.port:
        wanted = [number for name, number in ports.items() if query.port in (name, str(number))]
        if not wanted:
            raise BadRegistry(f"Kubernetes, {query}: there is no port {query.port}; the slices have {names}.")
        return int(wanted[0])
    if len(ports) != 1:
        raise BadRegistry(f"Kubernetes, {query}: set port; the slices have {names}.")
    return int(next(iter(ports.values())))


def _entry(name: str, address: str, port: int, query: SliceQuery) -> EngineEntry:
    return EngineEntry(
        name=name,
        url=f"{query.scheme}://{join(address, port)}",
        kv_events=f"tcp://{join(address, query.kv_events_port)}" if query.kv_events_port else "",
        kv_replay=f"tcp://{join(address, query.kv_replay_port)}" if query.kv_replay_port else "",
        api_key_file=query.api_key_file,
        model=query.model,
        block_size=query.block_size,
        api=query.api,
    )


def _configured(query: SliceQuery) -> tuple[Any, str]:
    """Returns a client of the API server and the namespace; raises ConfigException."""
    from kubernetes import client
    from kubernetes import config as untyped_config

    config: Any = untyped_config
    configuration = client.Configuration()
    namespace = query.namespace
    if not query.kubeconfig_file and not query.context and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=configuration)
        if not namespace:
            with open(NAMESPACE_FILE, encoding="utf-8") as file:
                namespace = file.read().strip()
    else:
        path, context = query.kubeconfig_file or None, query.context or None
        config.load_kube_config(path, context, client_configuration=configuration, persist_config=False)
        if not namespace:
            contexts, current = config.list_kube_config_contexts(path)
            used = next((one for one in contexts if one["name"] == context), current)
            namespace = used["context"].get("namespace") or "default"
    configuration.retries = False
    return client.ApiClient(configuration), namespace


def _refusal(status: int) -> str:
    if status == 401:
        return "the API server rejects the credentials (401)."
    if status == 403:
        return (
            "the API server forbids the list (403); "
            "allow the verb list on endpointslices of the API group discovery.k8s.io in a Role."
        )
    return f"the API server answered with status {status}."
