"""OpenAI requests, checked field by field.

Types are strict, as in OpenAI's own API: "0.5" is no number. Fields nobody knows are refused, and so are fields that
cannot be honoured here: nothing is dropped in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from services.common.errors import SluiceError, invalid

M = TypeVar("M", bound=BaseModel)

MAX_STOP_STRINGS = 1000
MAX_TOKEN_ID = 2**32 - 1


def _stop_strings(value: Any) -> Any:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise ValueError("must be a non-empty string or a list of non-empty strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(strings)} strings, more than {MAX_STOP_STRINGS}")
    return tuple(strings)


def _token_biases(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) and key.isdigit() for key in value):
        raise ValueError("must be an object from token ids to numbers")
    return {int(key): bias for key, bias in value.items()}


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
StopStrings = Annotated[tuple[str, ...], BeforeValidator(_stop_strings)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_token_biases), Field(max_length=4096)
]


class Strict(BaseModel):
    """Types are as said, and fields nobody knows are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(Strict):
    """What chat completions and completions have in common."""

    model: str = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    stop: StopStrings = ()
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logit_bias: LogitBias = Field(default_factory=dict)
    user: str | None = None

    # Customary extensions of the engines.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


class Tool(BaseModel):
    """A tool as the client described it; its schema is passed on as it is."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True)

    type: Literal["function"]
    function: dict[str, Any]


class ChatCompletionRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    tools: list[Tool] | None = Field(None, max_length=1024)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[str] | None = None
    reasoning_effort: str | None = None

    # Bookkeeping of OpenAI's own platform, without effect on the answer.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Customary extensions of the engines.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one; SluiceError(INVALID_ARGUMENT) when they are of no known form."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(isinstance(part, str) for part in prompt):
            return list(prompt)
        if prompt and all(_is_token_id(part) for part in prompt):
            return [list(prompt)]
        if prompt and all(isinstance(part, list) and part and all(map(_is_token_id, part)) for part in prompt):
            return list(prompt)
        raise invalid(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists.", param="prompt"
        )


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def check(kind: type[M], body: dict[str, Any]) -> M:
    """The body as a request of this kind; SluiceError(INVALID_ARGUMENT) names the first field that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise explain(error) from None


def explain(error: ValidationError) -> SluiceError:
    """The first thing wrong, naming its field as `messages[0].role`."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    if first["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {field}.", param=field, code="unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"Missing required parameter: {field}.", param=field, code="missing_required_parameter")
    said = first["msg"].removeprefix("Value error, ")
    param = field or said.split(" ", 1)[0]
    sentence = f"Invalid value for {field}: {said[0].lower()}{said[1:]}." if field else f"{said}."
    return invalid(sentence, param=param, code="invalid_value")
