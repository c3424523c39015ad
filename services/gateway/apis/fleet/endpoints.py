"""The endpoints that operate workers: LoRA adapters, sleep and the prefix cache. They require the scope `operate`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from services.common.base.errors import invalid
from services.gateway.apis.openai.fields import Strict
from services.gateway.apis.openai.openapi import responses
from services.gateway.apis.openai.response_schemas import Open
from services.gateway.apis.openai.validation import check
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.routes import ApiRoutes
from services.gateway.backends.workers.fleet_control import FleetControl
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core import context
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.http.json_transport import json_response
from services.gateway.operations.operation import Caller, Whole

FAILURES = (400, 401, 403, 404, 500, 503)
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}$")]


class LoadAdapterRequest(Strict):
    """POST /v1/load_lora_adapter."""

    model: str = Field(min_length=1)
    lora_name: AdapterName
    lora_path: Annotated[str, Field(max_length=4_096)] = ""


class UnloadAdapterRequest(Strict):
    """POST /v1/unload_lora_adapter."""

    model: str = Field(min_length=1)
    lora_name: AdapterName


class Operated(Open):
    """The workers that ran an action."""

    workers: list[str]


class FleetEndpoints:
    """Runs actions on all workers of a model."""

    def __init__(self, control: FleetControl, registry: WorkerRegistry, budgets: BodyBudgets) -> None:
        self._control = control
        self._registry = registry
        self._budgets = budgets

    async def load_lora_adapter(self, body: dict[str, Any], caller: Caller) -> Whole:
        """Load a LoRA adapter on all workers of a model, now and whenever one starts."""
        fields = check(LoadAdapterRequest, body, self._budgets)
        return Whole(_operated(await self._control.load_adapter(fields.model, fields.lora_name, fields.lora_path)))

    async def unload_lora_adapter(self, body: dict[str, Any], caller: Caller) -> Whole:
        """Unload a LoRA adapter from all workers of a model."""
        fields = check(UnloadAdapterRequest, body, self._budgets)
        return Whole(_operated(await self._control.unload_adapter(fields.model, fields.lora_name)))

    async def sleep(self, request: Request) -> Response:
        """Put the workers of a model to sleep once they are idle."""
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise invalid("level must be 1 or 2.", param="level", code="invalid_value")
        return json_response(_operated(await self._control.sleep(self._model(request), int(level))))

    async def wake_up(self, request: Request) -> Response:
        """Wake the workers of a model."""
        model = request.query_params.get("model") or await self._control.only_asleep()
        context.current().permit.check_model(model, "model")
        return json_response(_operated(await self._control.wake(model)))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Clear the prefix caches of the workers of a model."""
        return json_response(_operated(await self._control.reset_prefix_cache(self._model(request))))

    def _model(self, request: Request) -> str:
        if model := request.query_params.get("model") or self._registry.only_model():
            context.current().permit.check_model(model, "model")
            return model
        raise invalid("model is missing; several models, or none, are served.", param="model")


def _operated(workers: list[str]) -> dict[str, Any]:
    return {"workers": sorted(workers)}


def add_api(parts: ApiParts, routes: ApiRoutes) -> None:
    """Adds the routes."""
    endpoints = FleetEndpoints(parts.fleet, parts.registry, parts.settings.budgets)
    done, tag = responses(Operated, FAILURES), "Operations"
    routes.add("/v1/load_lora_adapter", endpoints.load_lora_adapter, done, tag=tag, body=LoadAdapterRequest)
    routes.add("/v1/unload_lora_adapter", endpoints.unload_lora_adapter, done, tag=tag, body=UnloadAdapterRequest)
    model = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}
    level = {"name": "level", "in": "query", "required": False, "schema": {"enum": [1, 2], "default": 1}}
    routes.add_http("/sleep", endpoints.sleep, done, tag=tag, parameters=[model, level])
    routes.add_http("/wake_up", endpoints.wake_up, done, tag=tag, parameters=[model])
    routes.add_http("/reset_prefix_cache", endpoints.reset_prefix_cache, done, tag=tag, parameters=[model])
