"""The request schema of POST /inference/v1/generate, with the fields of vLLM 0.33."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model, model_validator

from services.common.types.sampling import SCALARS
from services.gateway.apis.openai.fields import MAX_TOKEN_ID, JsonObject, Label, Priority, Strict, are_token_ids
from services.gateway.apis.openai.schemas import CompletionRequest, StreamOptions
from services.gateway.apis.openai.unsupported_fields import platform_field, reject_unsupported, unsupported_field

SAMPLING = (
    "n",
    *SCALARS,
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
    "truncate_prompt_tokens",
    "logits_processors",
    "repetition_detection",
)
"""Fields of sampling_params that completions have too, with the same meaning."""


def _ids(value: Any) -> Any:
    if not isinstance(value, list) or not value or not are_token_ids(value):
        raise ValueError(f"must be a list of at least one token id from 0 to {MAX_TOKEN_ID}")
    return value


class _EngineSampling(Strict):
    """Members of vLLM's sampling parameters that completions lack."""

    @model_validator(mode="after")
    def _supported(self) -> _EngineSampling:
        reject_unsupported(self)
        return self

    detokenize: bool | None = platform_field()
    output_kind: Any = unsupported_field("stream decides", 0, 1, 2)
    extra_args: Any = unsupported_field("use vllm_xargs of the request")
    flat_logprobs: Any = unsupported_field("log-probabilities are lists of objects", False)
    skip_clone: Any = unsupported_field("it is internal to vLLM", False)
    skip_reading_prefix_cache: Any = unsupported_field("use a cache_salt of your own", False)


SamplingFields = create_model(
    "SamplingFields",
    __base__=_EngineSampling,
    __doc__="The sampling parameters, as completions and vLLM name them.",
    **{name: (field.annotation, field) for name in SAMPLING if (field := CompletionRequest.model_fields[name])},  # type: ignore[call-overload]
)


class GenerateTokensRequest(Strict):
    """POST /inference/v1/generate."""

    model: str = Field(min_length=1)
    token_ids: Annotated[
        Any,
        BeforeValidator(_ids),
        WithJsonSchema(
            {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
        ),
    ]
    sampling_params: SamplingFields
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Label | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: Priority | None = None
    lora_path: str | None = Field(None, min_length=1, max_length=1024)
    vllm_xargs: JsonObject = None
    user: str | None = None

    features: Any = unsupported_field("only token ids are accepted")
    kv_transfer_params: Any = unsupported_field("the gateway arranges transfers itself")

    @model_validator(mode="after")
    def _fits_together(self) -> GenerateTokensRequest:
        reject_unsupported(self)
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream to be true")
        return self


CLIENT_NAMES = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in SAMPLING}}


class TokensRequest(CompletionRequest):
    """A completion of token ids whose fields the client knows by the names of GenerateTokensRequest."""

    client_names: ClassVar[Mapping[str, str]] = CLIENT_NAMES
