"""Routes of the Messages API and their OpenAPI documentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from services.gateway.apis.anthropic.dialect import VERSIONS
from services.gateway.apis.anthropic.endpoints import MessagesEndpoints
from services.gateway.apis.anthropic.response_schemas import AnthropicError, MessageAnswer, TokenCount
from services.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.gateway.apis.openai.openapi import GENERATING, add_route, responses

_HEADER = {"name": "anthropic-version", "in": "header", "required": False, "schema": {"enum": list(VERSIONS)}}


def add_messages(app: FastAPI, endpoints: MessagesEndpoints) -> list[type[BaseModel]]:
    """Adds the routes and returns the schemas of their request bodies."""
    add = partial(add_route, app, name="anthropic_", tag="Anthropic", parameters=[_HEADER])
    add("/v1/messages", endpoints.messages, _answers(MessageAnswer, streams=True), body=MessagesRequest)
    add("/v1/messages/count_tokens", endpoints.count_tokens, _answers(TokenCount), body=CountTokensRequest)
    return [MessagesRequest, CountTokensRequest]


def _answers(answer: type[BaseModel], streams: bool = False) -> dict[int | str, Any]:
    return {
        status: {**response, "model": AnthropicError} if status != 200 else response
        for status, response in responses(answer, GENERATING, streams).items()
    }
