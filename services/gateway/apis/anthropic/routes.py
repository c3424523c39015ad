"""Routes of the Messages API and their OpenAPI documentation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from services.gateway.apis.anthropic.dialect import VERSIONS
from services.gateway.apis.anthropic.endpoints import MessagesEndpoints
from services.gateway.apis.anthropic.response_schemas import AnthropicError, MessageAnswer, TokenCount
from services.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.gateway.apis.openai.openapi import GENERATING, body_of, responses

Endpoint = Callable[[Request], Awaitable[Response]]
_HEADER = {"name": "anthropic-version", "in": "header", "required": False, "schema": {"enum": list(VERSIONS)}}


def add_messages(app: FastAPI, endpoints: MessagesEndpoints) -> list[type[BaseModel]]:
    """Adds the routes and returns the schemas of their request bodies."""
    _add(app, "/v1/messages", endpoints.messages, MessagesRequest, MessageAnswer, streams=True)
    _add(app, "/v1/messages/count_tokens", endpoints.count_tokens, CountTokensRequest, TokenCount)
    return [MessagesRequest, CountTokensRequest]


def _add(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    body: type[BaseModel],
    response_model: type[BaseModel],
    streams: bool = False,
) -> None:
    async def handle(request: Request) -> Response:
        return await endpoint(request)

    handle.__doc__ = endpoint.__doc__
    documented: dict[int | str, Any] = {
        status: {**response, "model": AnthropicError} if status != 200 else response
        for status, response in responses(response_model, GENERATING, streams).items()
    }
    app.add_api_route(
        path,
        handle,
        methods=["POST"],
        response_class=Response,
        response_model=None,
        name=f"anthropic_{endpoint.__name__}",
        tags=["Anthropic"],
        responses=documented,
        openapi_extra={**body_of(body), "parameters": [_HEADER]},
    )
