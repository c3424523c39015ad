"""Routes of the Messages API and their OpenAPI documentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel

from services.gateway.apis.anthropic import models
from services.gateway.apis.anthropic.dialect import ERROR_FORMAT, VERSIONS, speaks_anthropic
from services.gateway.apis.anthropic.operations import MessageOperations
from services.gateway.apis.anthropic.response_schemas import (
    AnthropicError,
    AnthropicModel,
    AnthropicModelList,
    MessageAnswer,
    TokenCount,
)
from services.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.gateway.apis.openai.openapi import GENERATING, responses
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.routes import ApiRoutes, ModelListFormat

_HEADER = {"name": "anthropic-version", "in": "header", "required": False, "schema": {"enum": list(VERSIONS)}}


def add_api(parts: ApiParts, routes: ApiRoutes) -> None:
    """Adds the Messages API."""
    operations = MessageOperations(parts.runner, parts.settings)
    add = partial(routes.add, name="anthropic_", tag="Anthropic", parameters=[_HEADER])
    add("/v1/messages", operations.messages, _answers(MessageAnswer, streams=True), body=MessagesRequest)
    add("/v1/messages/count_tokens", operations.count_tokens, _answers(TokenCount), body=CountTokensRequest)
    routes.error_formats.append(ERROR_FORMAT)
    routes.model_formats.append(
        ModelListFormat((AnthropicModelList, AnthropicModel), speaks_anthropic, models.page, models.as_anthropic)
    )


def _answers(answer: type[BaseModel], streams: bool = False) -> dict[int | str, Any]:
    return {
        status: {**response, "model": AnthropicError} if status != 200 else response
        for status, response in responses(answer, GENERATING, streams).items()
    }
