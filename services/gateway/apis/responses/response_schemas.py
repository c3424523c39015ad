"""OpenAPI schemas of the Responses API's responses, which may have additional fields."""

from __future__ import annotations

from typing import Any, Literal

from services.gateway.apis.openai.response_schemas import Open


class ResponseUsage(Open):
    """Token counts of input and output."""

    input_tokens: int
    input_tokens_details: dict[str, Any]
    output_tokens: int
    output_tokens_details: dict[str, Any]
    total_tokens: int


class ResponseItem(Open):
    """A message, reasoning, a call, the output of one, or a compaction, which has no status."""

    id: str
    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "compaction",
    ]
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ResponseAnswer(Open):
    """A response object."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None


class CompactedAnswer(Open):
    """A compacted conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[ResponseItem]
    usage: ResponseUsage


class ResponseDeleted(Open):
    """The confirmation that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItemList(Open):
    """A page of the input items of a response."""

    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationAnswer(Open):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(Open):
    """The confirmation that a conversation was deleted."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class InputTokens(Open):
    """The length of a prompt in tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
