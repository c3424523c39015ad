"""OpenAPI schemas of the responses, which may have additional fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Open(BaseModel):
    """Base of schemas that allow additional fields."""

    model_config = ConfigDict(extra="allow")


class ErrorInfo(BaseModel):
    """The error's message, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: ErrorInfo


class Usage(Open):
    """Token counts of prompt and output."""

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
    """The message that the model generated."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCallAnswer] | None = None
    reasoning_content: str | None = None


class TopLogprob(Open):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobAnswer(TopLogprob):
    """A chosen token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Open):
    """One entry per token."""

    content: list[TokenLogprobAnswer] | None


class ChatChoice(Open):
    """One choice of a chat completion."""

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
    """Lists of equal length, with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Open):
    """One choice of a completion."""

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
    """One embedding: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Open):
    """Token counts of the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Open):
    """The embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingUsage


class Model(Open):
    """A model that is currently served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    modalities: list[str]


class ModelList(Open):
    """The models that are currently served."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Open):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Open):
    """The text of token ids."""

    prompt: str


class Rendered(Open):
    """A chat completion as its worker would receive it."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str
    sampling_params: dict[str, Any]
    max_model_len: int
    stream: bool
