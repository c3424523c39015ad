"""Request schemas of POST /v1/responses; the contents of `input` are validated by the module `items`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from services.gateway.apis.openai.engine_fields import EngineExtensions
from services.gateway.apis.openai.fields import (
    MAX_LOGPROBS,
    MAX_TOKEN_ID,
    JsonObject,
    Metadata,
    SchemaObject,
    StopStrings,
    Strict,
    within_list_items,
)
from services.gateway.apis.openai.unsupported_fields import (
    hint_field,
    no_effect_field,
    platform_field,
    reject_unsupported,
    unsupported_field,
)
from services.gateway.apis.responses.openapi_schemas import CONVERSATION, INPUT, ITEM, MAX_TOOLS, TOOL_CHOICE, TOOLS

MAX_NEW_ITEMS = 20
"""Items that one request may add to a conversation; more are refused with INVALID_ARGUMENT."""

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


def _input(value: Any, info: ValidationInfo) -> Any:
    within_list_items(value, info)
    if not isinstance(value, str | list) or not value:
        raise ValueError("must be a non-empty string or a list of at least one item")
    return value


def _items(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, list) or len(value) > MAX_NEW_ITEMS:
        raise ValueError(f"must be a list of at most {MAX_NEW_ITEMS} items")
    return value


def _tools(value: Any) -> Any:
    if value is not None and not isinstance(value, list):
        raise ValueError("must be a list of tools")
    if value is not None and len(value) > MAX_TOOLS:
        raise ValueError(f"has more than {MAX_TOOLS} tools")
    return value


def _tool_choice(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise ValueError("must be none, auto, required or an object with a type")
    return value


Input = Annotated[
    Any,
    BeforeValidator(_input),
    WithJsonSchema(INPUT),
]
Tools = Annotated[
    list[Any] | None,
    BeforeValidator(_tools),
    WithJsonSchema(TOOLS),
]
ToolChoice = Annotated[
    Any,
    BeforeValidator(_tool_choice),
    WithJsonSchema(TOOL_CHOICE),
]


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_obfuscation: bool | None = platform_field()


class TextFormat(Strict):
    """The format of the output text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_document: SchemaObject = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_document is None):
            raise ValueError("requires name and schema when type is json_schema")
        if self.type != "json_schema" and (self.name or self.schema_document is not None):
            raise ValueError("accepts name and schema only when type is json_schema")
        return self


class TextOptions(Strict):
    """Options of the output text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = no_effect_field("request a length in the prompt", "medium")

    @model_validator(mode="after")
    def _can_be_honoured(self) -> TextOptions:
        reject_unsupported(self)
        return self


class ReasoningOptions(Strict):
    """Whether and how the model reasons, and how the response contains it."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = hint_field()
    summary: Literal["auto", "detailed", "concise"] | None = None
    generate_summary: Literal["auto", "detailed", "concise"] | None = None
    context: Any = unsupported_field("the model's template decides which earlier reasoning is in the prompt", "auto")
    mode: Any = unsupported_field("only the standard mode exists", "standard")

    @property
    def as_summary(self) -> bool:
        """Whether reasoning is returned as its summary."""
        return (self.summary or self.generate_summary) is not None

    @model_validator(mode="after")
    def _can_be_honoured(self) -> ReasoningOptions:
        reject_unsupported(self)
        if "concise" in (self.summary, self.generate_summary):
            raise ValueError("does not support concise summaries; use auto or detailed")
        return self


class ConversationReference(Strict):
    """A conversation, by its id."""

    id: str = Field(min_length=1, max_length=128)


ConversationField = Annotated[
    ConversationReference | None,
    BeforeValidator(lambda value: {"id": value} if isinstance(value, str) else value),
    WithJsonSchema(CONVERSATION),
]


class ContextFields(Strict):
    """The fields that determine the prompt."""

    model: str = Field(min_length=1)
    input: Input = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None

    conversation: ConversationField = None

    @property
    def conversation_id(self) -> str:
        """The id of the conversation that the request continues; empty for none."""
        return "" if self.conversation is None else self.conversation.id

    @model_validator(mode="after")
    def _has_input(self) -> ContextFields:
        if self.input is None and self.previous_response_id is None and self.conversation is None:
            raise ValueError("input is missing")
        return self

    @model_validator(mode="after")
    def _continues_one(self) -> ContextFields:
        if self.conversation is not None and self.previous_response_id is not None:
            raise ValueError("conversation and previous_response_id exclude each other")
        return self


class InputTokensRequest(ContextFields):
    """POST /v1/responses/input_tokens."""

    personality: Any = unsupported_field("describe it in the instructions")

    @model_validator(mode="after")
    def _can_be_honoured(self) -> InputTokensRequest:
        reject_unsupported(self)
        return self


ConversationItemList = Annotated[
    list[Any], BeforeValidator(_items), WithJsonSchema({"type": "array", "items": ITEM, "maxItems": MAX_NEW_ITEMS})
]


class ConversationRequest(Strict):
    """POST /v1/conversations."""

    items: ConversationItemList | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Strict):
    """POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class ConversationItems(Strict):
    """POST /v1/conversations/{conversation_id}/items."""

    items: ConversationItemList


class CompactRequest(ContextFields):
    """POST /v1/responses/compact."""

    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = platform_field()
    prompt_cache_options: JsonObject = platform_field()
    service_tier: Literal["auto", "default", "flex", "priority", "fast"] | None = platform_field()

    @model_validator(mode="after")
    def _can_be_honoured(self) -> CompactRequest:
        reject_unsupported(self)
        return self


class ResponsesRequest(ContextFields, EngineExtensions):
    """POST /v1/responses."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Includable] | None = Field(None, max_length=64, fail_fast=True)
    metadata: Metadata | None = None
    store: bool | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    stop: StopStrings = ()

    # Fields of OpenAI's platform without effect on the output; prompt_cache_key and user may identify a session.
    max_tool_calls: int | None = platform_field(ge=1, le=MAX_TOKEN_ID)
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = platform_field()
    user: str | None = None
    safety_identifier: str | None = platform_field()
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = platform_field()
    prompt_cache_options: JsonObject = platform_field()

    background: bool | None = None
    background_options: Any = unsupported_field("background responses have no options")
    prompt: Any = unsupported_field("prompt templates are not stored; send instructions")
    context_management: Any = no_effect_field("the context is not compacted between requests; use truncation", [])
    client_metadata: JsonObject = platform_field()
    moderation: Any = unsupported_field("moderation is not supported")
    access_programs: Any = unsupported_field("access programs do not exist")
    image: Any = unsupported_field("only text input is accepted")

    @property
    def includes(self) -> frozenset[str]:
        """The values of `include`."""
        return frozenset(self.include or ())

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives per token; None without log-probabilities."""
        if self.top_logprobs is None and "message.output_text.logprobs" not in self.includes:
            return None
        return self.top_logprobs or 0

    @model_validator(mode="after")
    def _fits_together(self) -> ResponsesRequest:
        reject_unsupported(self)
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.background and self.store is False:
            raise ValueError("background needs store to be true")
        return self


class WarmUpRequest(ResponsesRequest):
    """The event response.create with `generate` false, which may have no input."""

    @model_validator(mode="after")
    def _has_input(self) -> WarmUpRequest:
        return self
