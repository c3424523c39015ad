"""Request schemas of POST /v1/messages and /v1/messages/count_tokens.

The contents of `messages`, `system` and `tools` are validated by the modules `blocks` and `tools`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import ErrorDetails

from services.common.base.errors import SluiceError, invalid
from services.gateway.apis.anthropic.dialect import THREADS_UNSUPPORTED
from services.gateway.apis.anthropic.openapi_schemas import MESSAGES, SYSTEM, TOOL_CHOICE, TOOLS
from services.gateway.apis.openai.engine_fields import EngineExtensions
from services.gateway.apis.openai.fields import MAX_STOP_STRINGS, MAX_TOKEN_ID, Strict, within_list_items
from services.gateway.apis.openai.unsupported_fields import (
    UNSUPPORTED,
    hint_field,
    no_effect_field,
    platform_field,
    reject_unsupported,
    unsupported_field,
)
from services.gateway.apis.openai.validation import MAX_NAME

MAX_TOOLS = 1024
"""Tools of a request of the Messages API; more are refused with INVALID_ARGUMENT."""
MIN_THINKING_BUDGET = 1024
"""Tokens of `thinking.budget_tokens`; fewer are refused with INVALID_ARGUMENT."""


def _messages(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, list):
        raise ValueError("must be a list of messages")
    if not value:
        raise ValueError("at least one message is required")
    return within_list_items(value, info)


def _system(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of text blocks")
    return within_list_items(value, info)


def _tools(value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError("must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"must have at most {MAX_TOOLS} tools")
    return value


def _object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


def _context_management(value: Any) -> Any:
    """Returns None for edits that change nothing: none at all, or those that keep all thinking, which stays anyway."""
    if value is not None and not isinstance(value, dict):
        raise ValueError("must be an object")
    edits = (value or {}).get("edits")
    if edits is not None and not (isinstance(edits, list) and all(isinstance(edit, dict) for edit in edits)):
        raise ValueError("must have a list of edits")
    kept = all(
        str(edit.get("type")).startswith("clear_thinking_") and edit.get("keep") == "all" for edit in edits or ()
    )
    return None if kept else value


StopSequence = Annotated[str, Field(min_length=1, pattern=r"\S")]
ThinkingBudget = Annotated[int, Field(ge=MIN_THINKING_BUDGET, le=MAX_TOKEN_ID)]


class CacheControl(Strict):
    """A cache breakpoint; accepted without effect, because prefixes are always cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[str, Field(max_length=64)] | None = None


class Metadata(Strict):
    """Metadata of the request."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


class Thinking(Strict):
    """Whether the model thinks, for how many tokens, and whether the response contains it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingBudget | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> Thinking:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("budget_tokens is required when type is enabled")
        if self.type != "enabled" and self.budget_tokens is not None:
            raise ValueError("budget_tokens is allowed only when type is enabled")
        if self.type == "disabled" and self.display is not None:
            raise ValueError("display is not allowed when type is disabled")
        return self


class OutputFormat(Strict):
    """The format of the output."""

    type: Literal["json_schema"]
    schema_document: Annotated[dict[str, Any], BeforeValidator(_object)] = Field(alias="schema")


class OutputConfig(Strict):
    """The reasoning effort and the format of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = hint_field()
    format: OutputFormat | None = None


class PromptFields(Strict):
    """The fields that determine the prompt."""

    model: str = Field(min_length=1)
    messages: Annotated[list[Any], BeforeValidator(_messages), WithJsonSchema(MESSAGES)]
    system: Annotated[Any, BeforeValidator(_system), WithJsonSchema(SYSTEM)] = None
    tools: Annotated[list[Any], BeforeValidator(_tools), WithJsonSchema(TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[Any, BeforeValidator(_object), WithJsonSchema(TOOL_CHOICE)] = None
    thinking: Thinking | None = hint_field()
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = platform_field()

    thread: Any = unsupported_field("threads are not kept here; send the whole conversation")
    compaction: Any = unsupported_field("conversations are not summarized here; ask the model for a summary")
    speed: Any = unsupported_field("only the standard speed exists", "standard")
    mcp_servers: Any = unsupported_field("Sluice does not call MCP servers; describe their tools in tools", [])
    context_management: Annotated[Any, BeforeValidator(_context_management)] = no_effect_field(
        "the context is not edited here; send the messages for the model"
    )

    @model_validator(mode="after")
    def _can_be_honoured(self) -> PromptFields:
        reject_unsupported(self)
        return self


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, EngineExtensions):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_TOKEN_ID)
    stream: bool | None = None
    stop_sequences: list[StopSequence] | None = Field(None, max_length=MAX_STOP_STRINGS, fail_fast=True)
    temperature: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = platform_field()

    container: Any = unsupported_field("containers are not supported")
    billing_policy: Any = no_effect_field("requests are not billed here")
    fallbacks: Any = no_effect_field("the models served here return no refusals", [])
    fallback_credit_token: Any = no_effect_field("the models served here return no refusals")
    diagnostics: Any = no_effect_field("usage reports the cached tokens")
    inference_geo: Any = unsupported_field("the operator decides where requests run")

    @model_validator(mode="after")
    def _fits_together(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise ValueError("max_tokens must be greater than thinking.budget_tokens")
        return self


def explain(first: ErrorDetails) -> SluiceError:
    """Returns a validation error, formatted as Anthropic does: `messages.0.role: …`."""
    parts = [str(part)[:MAX_NAME] for part in first["loc"] if part != "[key]"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return _error(parts, "Extra inputs are not permitted")
    if first["type"] == "missing":
        return _error(parts, "Field required")
    if first["type"] == UNSUPPORTED or (first["type"] == "value_error" and (not parts or parts == ["thinking"])):
        name, _, message = message.partition(" ")
        if name == "thread":
            return invalid(f"thread: {message}.", param=name, code=THREADS_UNSUPPORTED)
        return _error([*parts, name], message)
    return _error(parts, message)


def _error(parts: list[str], message: str) -> SluiceError:
    field = ".".join(parts)
    return invalid(f"{field}: {message}.", param=field, code="invalid_value")
