"""What the Responses API answers, for its documentation. Answers may have more fields than these."""

from __future__ import annotations

from typing import Any, Literal

from services.gateway.apis.openai.response_schemas import Open


class ResponseUsage(Open):
    """Tokens of prompt and answer."""

    input_tokens: int
    input_tokens_details: dict[str, Any]
    output_tokens: int
    output_tokens_details: dict[str, Any]
    total_tokens: int


class ResponseItem(Open):
    """A message, reasoning, a call of a function, or what it answered."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseAnswer(Open):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed"]
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None


class ResponseDeleted(Open):
    """A response was forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItemList(Open):
    """Items that a response was made from."""

    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Open):
    """How long a prompt is."""

    object: Literal["response.input_tokens"]
    input_tokens: int
