"""Request schemas of chat completions and completions.

Unknown and unsupported fields are rejected, never silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from services.gateway.apis.openai.engine_fields import EngineFields
from services.gateway.apis.openai.fields import (
    MAX_LOGPROBS,
    MAX_TOKEN_ID,
    JsonObject,
    LogitBias,
    Metadata,
    PromptInput,
    SchemaObject,
    StopStrings,
    Strict,
    check_list_items,
    one_by_one,
    within_list_items,
)
from services.gateway.apis.openai.nvext import Nvext
from services.gateway.apis.openai.openapi_schemas import MESSAGES, TOOL_CHOICE
from services.gateway.apis.openai.unsupported_fields import (
    hint_field,
    no_effect_field,
    platform_field,
    reject_unsupported,
    unsupported_field,
)

MAX_TOOLS = 1_024
"""Tools of a chat; more are refused with INVALID_ARGUMENT."""


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = platform_field()


class GenerationFields(EngineFields):
    """Fields shared by chat completions and completions."""

    client_names: ClassVar[Mapping[str, str]] = {}
    """The client's names of fields whose names differ."""

    model: str = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    stop: StopStrings = ()
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    logit_bias: LogitBias = Field(default_factory=dict)
    user: str | None = None
    nvext: Nvext | None = None

    @property
    def session_names(self) -> dict[str, str | None]:
        """Fields that may identify the request's session, by name."""
        return {"user": self.user}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream contains the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats)

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationFields:
        if self.model_fields_set:
            reject_unsupported(self)
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed; set stream to false")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for the context length")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValueError("truncation_side requires truncate_prompt_tokens")
        return self


class Function(BaseModel):
    """The function of a tool; its schema is passed on unchanged."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True)

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: SchemaObject = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool; additional fields are passed on unchanged."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True)

    type: Literal["function"]
    function: Function


def _check_tool_choice(choice: Any) -> None:
    if choice is None or choice in ("none", "auto", "required"):
        return
    if not isinstance(choice, dict):
        raise ValueError("tool_choice must be none, auto, required or an object that names one function")
    if choice.get("type") != "function":
        raise ValueError("tool_choice.type must be function")
    function = choice.get("function")
    if not isinstance(function, dict):
        raise ValueError("tool_choice.function must be an object with a name")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("tool_choice.function.name must be a non-empty string")


def _messages(value: Any, info: ValidationInfo) -> Any:
    within_list_items(value, info)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    for index, message in enumerate(value):
        if isinstance(message, dict):
            check_list_items(message.get("content"), f"messages[{index}].content", info)
            check_list_items(message.get("tool_calls"), f"messages[{index}].tool_calls", info)
    return value


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[Any, WithJsonSchema(TOOL_CHOICE)]
Documents = Annotated[list[Any], BeforeValidator(within_list_items)]
Messages = Annotated[list[Any], BeforeValidator(_messages), WithJsonSchema(MESSAGES)]


class ChatCompletionRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    modalities: list[str] | None = Field(None, max_length=8, fail_fast=True)
    enable_thinking: bool | None = hint_field()
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = hint_field()

    # Fields of OpenAI's platform without effect on the output; prompt_cache_key may identify a session.
    metadata: Metadata | None = platform_field()
    store: bool | None = platform_field()
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = platform_field()
    safety_identifier: str | None = platform_field()
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = platform_field()
    prompt_cache_options: JsonObject = platform_field()

    # Extensions of vLLM and SGLang.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject = None
    documents: Documents | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    functions: Any = unsupported_field("it is deprecated; use tools")
    function_call: Any = unsupported_field("it is deprecated; use tool_choice")
    moderation: Any = unsupported_field("moderation is not supported")
    audio: Any = unsupported_field("only text output is generated")
    prediction: Any = unsupported_field("predicted outputs are not implemented")
    web_search_options: Any = unsupported_field("web search is not built in; describe a tool")
    verbosity: Literal["low", "medium", "high"] | None = no_effect_field("request a length in the prompt", "medium")
    best_of: Any = unsupported_field("use n", 1)
    echo: Any = unsupported_field("only completions can echo their prompt", False)
    add_special_tokens: Any = unsupported_field("the chat template adds special tokens", False)
    return_prompt_text: Any = unsupported_field("use /v1/chat/completions/render", False)
    return_prompt_token_ids: Any = unsupported_field("use return_token_ids", False)
    return_meta_info: Any = unsupported_field("use usage and logprobs", False)
    return_input_ids_in_sglext: Any = unsupported_field("use return_token_ids", False)
    return_output_ids_in_sglext: Any = unsupported_field("use return_token_ids", False)
    return_sampling_mask: Any = unsupported_field("workers do not report it", False)
    sampling_logprobs_mode: Any = unsupported_field("workers report the model's unmodified log-probabilities")
    return_flat_raw_output_top_logprobs: Any = unsupported_field("use top_logprobs", False)
    stream_reasoning: Any = unsupported_field("reasoning is always streamed", True)
    thinking: Any = unsupported_field("use chat_template_kwargs or reasoning_effort, depending on the model's template")
    task: Any = unsupported_field("use chat_template_kwargs")
    input_ids: Any = unsupported_field("send token ids to /v1/completions")
    max_dynamic_patch: Any = unsupported_field("only text input is accepted")
    min_dynamic_patch: Any = unsupported_field("only text input is accepted")
    use_audio_in_video: Any = unsupported_field("only text input is accepted", False)
    video_config: Any = unsupported_field("only text input is accepted")

    @property
    def session_names(self) -> dict[str, str | None]:
        return {"prompt_cache_key": self.prompt_cache_key, "user": self.user}

    @model_validator(mode="after")
    def _chat_fits_together(self) -> ChatCompletionRequest:
        _check_tool_choice(self.tool_choice)
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs to be true")
        if self.modalities is not None and self.modalities != ["text"]:
            raise ValueError("modalities must be ['text']")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: PromptInput | None = None
    prompt_embeds: str | None = Field(
        None, min_length=1, description="base64 of a file of torch.save or numpy.save with an array [tokens, width]"
    )
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The single prompts; empty if prompt_embeds replaces them."""
        return [] if self.prompt is None or self.prompt_embeds is not None else one_by_one(self.prompt)

    @model_validator(mode="after")
    def _completion_fits_together(self) -> CompletionRequest:
        # Some client libraries require a prompt and send an empty one with the embeddings.
        if (self.prompt is None or (self.prompt == "" and self.prompt_embeds is not None)) == (
            self.prompt_embeds is None
        ):
            raise ValueError("prompt or prompt_embeds must be set, but not both")
        if self.suffix and (self.echo or self.prompt is None):
            raise ValueError("suffix requires a prompt, and echo to be false")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens can be 0 only with echo, to return the prompt's logprobs")
        if self.prompt_embeds is not None and (self.echo or self.prompt_logprobs is not None):
            raise ValueError(f"{'echo' if self.echo else 'prompt_logprobs'} requires a prompt of text or token ids")
        return self
