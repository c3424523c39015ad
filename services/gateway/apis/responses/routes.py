"""Routes of the Responses API and their OpenAPI documentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp

from services.gateway.apis.openai.openapi import GENERATING, add_route, responses
from services.gateway.apis.responses.endpoints import ResponsesEndpoints
from services.gateway.apis.responses.response_schemas import (
    CompactedAnswer,
    InputTokens,
    ResponseAnswer,
    ResponseDeleted,
    ResponseItemList,
)
from services.gateway.apis.responses.schemas import CompactRequest, InputTokensRequest, ResponsesRequest

STORED = "/v1/responses/{response_id}"


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
PAGE = [
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    _query("order", {"enum": ["asc", "desc"], "default": "desc"}),
    _query("after", {"type": "string"}),
]
"""The parameters of a page of items."""
_FAILURES = (400, 401, 404, 500, 503)
_STREAM = [
    _query("stream", {"type": "boolean", "default": False}),
    _query("starting_after", {"type": "integer", "minimum": 0}),
]


def add_responses(app: FastAPI, endpoints: ResponsesEndpoints, sockets: ASGIApp) -> list[type[BaseModel]]:
    """Adds the routes and returns the schemas of their request bodies.

    Args:
        sockets: serves /v1/responses over WebSocket.
    """
    app.router.routes.append(WebSocketRoute("/v1/responses", sockets))
    add = partial(add_route, app, name="responses_")
    created = responses(ResponseAnswer, GENERATING, streams=True)
    add("/v1/responses", endpoints.create, created, body=ResponsesRequest)
    counted = responses(InputTokens, GENERATING)
    add("/v1/responses/input_tokens", endpoints.input_tokens, counted, body=InputTokensRequest)
    compacted = responses(CompactedAnswer, GENERATING)
    add("/v1/responses/compact", endpoints.compact, compacted, body=CompactRequest)
    retrieved = responses(ResponseAnswer, _FAILURES, streams=True)
    add(STORED, endpoints.retrieve, retrieved, method="GET", parameters=[_ID, *_STREAM])
    add(STORED, endpoints.delete, responses(ResponseDeleted, _FAILURES), method="DELETE", parameters=[_ID])
    listed = responses(ResponseItemList, _FAILURES)
    add(f"{STORED}/input_items", endpoints.input_items, listed, method="GET", parameters=[_ID, *PAGE])
    cancelled = responses(ResponseAnswer, (*_FAILURES, 429))
    add(f"{STORED}/cancel", endpoints.cancel, cancelled, parameters=[_ID])
    return [ResponsesRequest, InputTokensRequest, CompactRequest]
