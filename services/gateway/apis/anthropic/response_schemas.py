"""What the Messages API answers, for its documentation. Answers may have more fields than these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import RootModel

from services.gateway.apis.openai.response_schemas import Model, ModelList, Open


class AnthropicErrorInfo(Open):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(Open):
    """Every error of the Messages API."""

    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str | None


class MessageUsage(Open):
    """Tokens of prompt and answer; input tokens are those that came from no cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBlock(Open):
    """Text, thinking or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]


class MessageAnswer(Open):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    degraded: list[Any] | None = None


class TokenCount(Open):
    """How long a prompt is."""

    input_tokens: int


class AnthropicModel(Open):
    """A model that workers serve now."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(Open):
    """All of them."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class EitherModel(RootModel[Model | AnthropicModel]):
    """OpenAI's form, or Anthropic's for requests with an `anthropic-version`."""


class EitherModelList(RootModel[ModelList | AnthropicModelList]):
    """OpenAI's form, or Anthropic's for requests with an `anthropic-version`."""
