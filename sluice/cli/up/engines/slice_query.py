"""Which endpoints of a Kubernetes cluster are engines, and how their servers are reached."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.common.base.errors import quoted
from sluice.cli.up.engines.entries import PROBLEMS, between

SCHEMES = ("http", "https", "grpc")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
MAX_SELECTOR_LENGTH = 1024
"""Characters of a label selector in the file of `sluice follow`; a file with a longer one is refused."""


@dataclass(frozen=True, slots=True)
class SliceQuery:
    """The fields under `kubernetes:` in the file of engines.

    Attributes:
        service: a Service whose endpoints are engines; excludes `selector`.
        selector: selects EndpointSlices by label; Kubernetes copies the labels of a Service to its slices.
        namespace: by default that of the pod, or of the kubeconfig's context.
        port: name or number of a port of the slices; by default their only one.
        scheme: http, https, or grpc for `vllm serve --grpc`.
        kv_events_port: port of rank 0's KV events on the address of the endpoint; 0: as the server reports it.
        kv_replay_port: port from which missed events are requested.
        api_key_file, model, block_size, api: of every engine, as in a list.
        kubeconfig_file: by default the pod's service account, or else KUBECONFIG or ~/.kube/config.
        context: of the kubeconfig; by default its current one.
    """

    service: str = ""
    selector: str = ""
    namespace: str = ""
    port: str = ""
    scheme: str = "http"
    kv_events_port: int = 0
    kv_replay_port: int = 0
    api_key_file: str = ""
    model: str = ""
    block_size: int = 0
    api: str = ""
    kubeconfig_file: str = ""
    context: str = ""

    @property
    def label_selector(self) -> str:
        """The selector of the slices."""
        return f"kubernetes.io/service-name={self.service}" if self.service else self.selector

    def __str__(self) -> str:
        return f"service {self.service}" if self.service else f"selector {quoted(self.selector)}"


def _label_problem(name: str) -> str:
    return "" if _LABEL.fullmatch(name) and len(name) <= 63 else f"is {quoted(name)}; expected a name of Kubernetes"


def _text_problem(text: str) -> str:
    return "" if 0 < len(text) <= MAX_SELECTOR_LENGTH else f"must have 1 to {MAX_SELECTOR_LENGTH} characters"


def _scheme_problem(scheme: str) -> str:
    return "" if scheme in SCHEMES else f"is {quoted(scheme)}; use {', '.join(SCHEMES)}"


_port = between(1, 65535)
SLICE_NUMBERS = ("kv_events_port", "kv_replay_port", "block_size")
SLICE_PROBLEMS: Mapping[str, Callable[[str], str]] = {
    "service": _label_problem,
    "selector": _text_problem,
    "namespace": _label_problem,
    "port": lambda port: _port(port) if port.isdecimal() else _label_problem(port),
    "scheme": _scheme_problem,
    "kv_events_port": _port,
    "kv_replay_port": _port,
    "api_key_file": PROBLEMS["api_key_file"],
    "model": PROBLEMS["model"],
    "block_size": PROBLEMS["block_size"],
    "api": PROBLEMS["api"],
    "kubeconfig_file": PROBLEMS["api_key_file"],
    "context": _text_problem,
}
