"""OpenAPI schemas of the Messages API's responses, which may have additional fields."""

from __future__ import annotations

from typing import Any, Literal

from services.gateway.apis.openai.response_schemas import Open


class AnthropicErrorInfo(Open):
    """The error's type and message."""

    type: str
    message: str


class AnthropicError(Open):
    """The body of every error of the Messages API."""

    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str | None


class MessageUsage(Open):
    """Token counts; cached tokens are not part of `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBlock(Open):
    """A block of text or thinking, or a tool call."""

    type: Literal["text", "thinking", "tool_use"]


class MessageAnswer(Open):
    """A completed message."""

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
    """The length of a prompt in tokens."""

    input_tokens: int


class AnthropicModel(Open):
    """A model that is currently served."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(Open):
    """A page of the served models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
