"""Routes of the Responses API and their OpenAPI documentation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from services.gateway.apis.openai.openapi import GENERATING, body_of, responses
from services.gateway.apis.responses.endpoints import ResponsesEndpoints
from services.gateway.apis.responses.response_schemas import (
    InputTokens,
    ResponseAnswer,
    ResponseDeleted,
    ResponseItemList,
)
from services.gateway.apis.responses.schemas import InputTokensRequest, ResponsesRequest

STORED = "/v1/responses/{response_id}"
Endpoint = Callable[[Request], Awaitable[Response]]


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_PAGE = [
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    _query("order", {"enum": ["asc", "desc"], "default": "desc"}),
    _query("after", {"type": "string"}),
]
_FAILURES = (400, 401, 404, 500, 503)
_STREAM = [_query("stream", {"type": "boolean", "default": False})]


def add_responses(app: FastAPI, endpoints: ResponsesEndpoints) -> list[type[BaseModel]]:
    """Adds the routes and returns the schemas of their request bodies."""
    _post(app, "/v1/responses", endpoints.create, ResponsesRequest, ResponseAnswer, streams=True)
    _post(app, "/v1/responses/input_tokens", endpoints.input_tokens, InputTokensRequest, InputTokens)
    _add_stored(app, "GET", STORED, endpoints.retrieve, responses(ResponseAnswer, _FAILURES), _STREAM)
    _add_stored(app, "DELETE", STORED, endpoints.delete, responses(ResponseDeleted, _FAILURES), [])
    _add_stored(
        app, "GET", f"{STORED}/input_items", endpoints.input_items, responses(ResponseItemList, _FAILURES), _PAGE
    )
    _add_stored(app, "POST", f"{STORED}/cancel", endpoints.cancel, responses(ResponseAnswer, (*_FAILURES, 429)), [])
    return [ResponsesRequest, InputTokensRequest]


def _post(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    body: type[BaseModel],
    response_model: type[BaseModel],
    streams: bool = False,
) -> None:
    _add(app, "POST", path, endpoint, responses(response_model, GENERATING, streams), body_of(body))


def _add_stored(
    app: FastAPI,
    method: str,
    path: str,
    endpoint: Endpoint,
    documented: dict[int | str, Any],
    parameters: list[dict[str, Any]],
) -> None:
    _add(app, method, path, endpoint, documented, {"parameters": [_ID, *parameters]})


def _add(
    app: FastAPI, method: str, path: str, endpoint: Endpoint, documented: dict[int | str, Any], extra: dict[str, Any]
) -> None:
    async def handle(request: Request) -> Response:
        return await endpoint(request)

    handle.__doc__ = endpoint.__doc__
    app.add_api_route(
        path,
        handle,
        methods=[method],
        response_class=Response,
        response_model=None,
        name=f"responses_{endpoint.__name__}",
        tags=["OpenAI"],
        responses=documented,
        openapi_extra=extra,
    )
