"""The scopes that an HTTP request requires, by its path, headers and body fields, for all APIs.

Endpoints require no further scopes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from services.gateway.admission.permit import Permit
from services.gateway.admission.scopes import Scope
from services.gateway.http.middleware.routing_hints import ENDPOINT, HEADERS
from services.gateway.pipeline.config import PipelineConfig

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/docs", "/openapi.json"))
"""Paths without authentication: they show no model and no client. `/ready` reports more to valid keys."""
LIVE_PAGE = re.compile(r"/ui(/[^/]*)?")
"""The page of the live view and its files, also without authentication; its data is below /ui/data."""
_OPERATE_PATHS = re.compile(
    r"/metrics/?|/ui/.*|/v1/(un)?load_lora_adapter|/sleep|/wake_up|/reset_prefix_cache", re.DOTALL
)

_SOURCE = re.compile(r"\{[{%#]")
"""Distinguishes the source of a Jinja template from the name of an installed one."""
_ENGINE_OPTIONS = ("vllm_xargs", "custom_params")
_PINNING_OPTIONS = ("disagg_prefill_dp_rank", "kv_hints", "routed_dp_rank")
"""Engine options that select ranks, or workers to fetch blocks from."""


def of_path(path: str) -> Scope | None:
    """Returns the scope that a path requires; None if it requires no key."""
    if path in OPEN_PATHS or LIVE_PAGE.fullmatch(path):
        return None
    return Scope.OPERATE if _OPERATE_PATHS.fullmatch(path) else Scope.INFER


def without_effect(config: PipelineConfig) -> frozenset[bytes]:
    """Returns the headers that name workers but have no effect with this configuration.

    A scheduler in front of gateways sends one of them to name the gateway, with the keys of its clients.
    """
    reads_endpoint = config.routing == "direct" or "place" in config.stages
    return frozenset() if reads_endpoint else frozenset((ENDPOINT.encode(),))


def check_headers(permit: Permit, headers: Iterable[tuple[bytes, bytes]], ignored: frozenset[bytes]) -> None:
    """Raises SluiceError(PERMISSION_DENIED) for a header that requires a missing scope.

    Args:
        ignored: headers without effect, see `without_effect`.
    """
    if permit.may(Scope.PIN_WORKER):
        return
    for name, _ in headers:
        if name in HEADERS and name not in ignored:
            permit.require(Scope.PIN_WORKER, HEADERS[name])


class BodyNeeds(NamedTuple):
    """The models and scopes that a body of any API requires, each with its field."""

    models: tuple[tuple[str, str], ...]
    scopes: tuple[tuple[Scope, str], ...]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> BodyNeeds:
        """Returns what a body requires that is not validated yet."""
        models = tuple((name, field) for field in ("model", "lora_path") if isinstance(name := body.get(field), str))
        return cls(models, tuple(of_fields(body)))

    def check(self, permit: Permit) -> None:
        """Raises SluiceError(PERMISSION_DENIED) for a model, adapter or field that the key may not use."""
        for name, field in self.models:
            permit.check_model(name, field)
        for scope, field in self.scopes:
            permit.require(scope, field)


def check_body(permit: Permit, body: Mapping[str, Any]) -> None:
    """Raises SluiceError(PERMISSION_DENIED) for a field that requires a missing scope, or a model or adapter that the
    key may not use.

    Args:
        body: body of a request of any API, not validated yet.
    """
    BodyNeeds.of(body).check(permit)


def of_fields(body: Mapping[str, Any]) -> Iterator[tuple[Scope, str]]:
    """Yields the scopes that the fields of a body require, with the field; fields at neutral values require none."""
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
