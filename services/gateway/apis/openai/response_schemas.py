"""What the OpenAI endpoints answer, for the API's documentation. Answers may have more fields than these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Open(BaseModel):
    """More fields may come."""

    model_config = ConfigDict(extra="allow")


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error of every endpoint."""

    error: ErrorInfo


class Usage(Open):
    """Tokens of prompt and answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any]
    completion_tokens_details: dict[str, Any]


class FunctionOfCall(Open):
    """The function that the model calls; its arguments are JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(Open):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class ChatMessage(Open):
    """What the model answered."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCallAnswer] | None = None
    reasoning_content: str | None = None


class TopLogprob(Open):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobAnswer(TopLogprob):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Open):
    """One entry a token."""

    content: list[TokenLogprobAnswer] | None


class ChatChoice(Open):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None


class ChatCompletion(Open):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Open):
    """Lists of equal length, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Open):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None


class Completion(Open):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class EmbeddingAnswer(Open):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Open):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Open):
    """Vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingUsage


class Model(Open):
    """A model that workers serve now."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Open):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Open):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Open):
    """Text of token ids."""

    prompt: str


class Rendered(Open):
    """A chat completion as its worker would get it."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str
    sampling_params: dict[str, Any]
    max_model_len: int
    stream: bool
