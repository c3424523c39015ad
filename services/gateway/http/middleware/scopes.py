"""What of an HTTP request needs which scope: its path, its headers and the fields of its body.

The only place that decides it, whatever the API: endpoints ask for no scopes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from services.gateway.admission.permit import Permit
from services.gateway.admission.scopes import Scope
from services.gateway.http.middleware.routing_hints import ENDPOINT, HEADERS
from services.gateway.pipeline.config import PipelineConfig

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"))
"""Served without a key: they name no model and no client. `/ready` reports more to keys."""
LIVE_PAGE = re.compile(r"/ui(/[^/]*)?")
"""The same: the page of the live view and its files. Its data is below /ui/data."""
_OPERATED = re.compile(r"/metrics/?|/ui/.*", re.DOTALL)

_SOURCE = re.compile(r"\{[{%#]")
"""What the source of a Jinja template has and the name of an installed one has not."""
_ENGINE_OPTIONS = ("vllm_xargs", "custom_params")
_PINNING_OPTIONS = ("disagg_prefill_dp_rank", "kv_hints", "routed_dp_rank")
"""Options of engines that choose ranks, or workers to take blocks from."""


def of_path(path: str) -> Scope | None:
    """The scope that a path needs; None where no key is needed."""
    if path in OPEN_PATHS or LIVE_PAGE.fullmatch(path):
        return None
    return Scope.OPERATE if _OPERATED.fullmatch(path) else Scope.INFER


def without_effect(config: PipelineConfig) -> frozenset[bytes]:
    """Headers that name workers and that a gateway of this configuration does not look at.

    Where the router chooses, a scheduler in front of gateways names the gateway in one of them, with its clients' keys.
    """
    reads_endpoint = config.routing == "direct" or "place" in config.stages
    return frozenset() if reads_endpoint else frozenset((ENDPOINT.encode(),))


def check_headers(permit: Permit, headers: Iterable[tuple[bytes, bytes]], ignored: frozenset[bytes]) -> None:
    """Raises SluiceError(PERMISSION_DENIED) for a header that needs a scope which the permit lacks.

    Args:
        ignored: headers that have no effect, see `without_effect`.
    """
    if permit.may(Scope.PIN_WORKER):
        return
    for name, _ in headers:
        if name in HEADERS and name not in ignored:
            permit.require(Scope.PIN_WORKER, HEADERS[name])


def check_body(permit: Permit, body: Mapping[str, Any]) -> None:
    """Raises SluiceError(PERMISSION_DENIED) for a field that needs a scope which the permit lacks, and for a model or
    an adapter that its key may not use.

    Args:
        body: of a request of any API, before its fields are checked.
    """
    for field in ("model", "lora_path"):
        name = body.get(field)
        if isinstance(name, str):
            permit.check_model(name, field)
    for scope, field in of_fields(body):
        permit.require(scope, field)


def of_fields(body: Mapping[str, Any]) -> Iterator[tuple[Scope, str]]:
    """The scopes that the fields of a body need, each with the field. Fields at their neutral values need none."""
    if body.get("priority") not in (None, 0):
        yield Scope.PRIORITY, "priority"
    nvext = body.get("nvext")
    if nvext is not None and not (isinstance(nvext, dict) and all(value is None for value in nvext.values())):
        yield Scope.PIN_WORKER, "nvext"
    if body.get("data_parallel_rank") is not None:
        yield Scope.PIN_WORKER, "data_parallel_rank"
    for field in _ENGINE_OPTIONS:
        options = body.get(field)
        if isinstance(options, dict):
            yield from ((Scope.PIN_WORKER, f"{field}.{name}") for name in _PINNING_OPTIONS if name in options)
    template = body.get("chat_template")
    if isinstance(template, str) and _SOURCE.search(template):
        yield Scope.TEMPLATE, "chat_template"
