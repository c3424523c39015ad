"""Extensions of vLLM and SGLang to OpenAI's generation requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.apis.openai.fields import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_TOKEN_ID,
    MAX_TOKEN_IDS,
    JsonObject,
    Label,
    Priority,
    Strict,
    TokenId,
)
from services.gateway.apis.openai.structured_output_fields import GuidedFields
from services.gateway.apis.openai.unsupported_fields import no_effect_field, unsupported_field
from services.gateway.core.routing_hints import MAX_RANKS


class SharedFields(Strict):
    """Fields that every API accepts, as OpenAI and the engines name them."""

    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=2**31, allow_inf_nan=False)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024, fail_fast=True)
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    lora_path: str | None = Field(None, min_length=1, max_length=1024)
    vllm_xargs: JsonObject = None
    request_id: Label | None = None


class EngineExtensions(SharedFields):
    """Extension fields beyond the API's own, with the same meaning as in chat completions."""

    chat_template_kwargs: JsonObject = None

    def extensions(self) -> dict[str, Any]:
        """Returns the fields that are set, by their chat completion names."""
        return {name: value for name in EngineExtensions.model_fields if (value := getattr(self, name)) is not None}


class EngineFields(SharedFields, GuidedFields):
    """The extension fields of chat completions and completions, with the engines' own names."""

    top_k: int | None = Field(None, ge=-1, lt=2**31)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MAX_BAD_WORDS, fail_fast=True)
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = no_effect_field(
        "special tokens are written as the model's tokenizer writes them", True
    )
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    extra_key: str | None = Field(None, min_length=1, max_length=1024)
    data_parallel_rank: int | None = Field(None, ge=0, lt=MAX_RANKS, description="with routing direct only")
    custom_params: JsonObject = None
    rid: Label | None = None

    use_beam_search: Any = unsupported_field("beam search is not implemented", False)
    length_penalty: Any = unsupported_field("it applies to beam search only", 1, 1.0)
    logprob_token_ids: Any = unsupported_field("use top_logprobs")
    watermarking: Any = unsupported_field("outputs are not watermarked", False)
    watermark: Any = unsupported_field("outputs are not watermarked")
    repetition_detection: Any = unsupported_field("use a repetition_penalty")
    stream_interval: Any = unsupported_field("text is sent as it is generated", 1)
    stop_regex: Any = unsupported_field("use stop")
    logits_processors: Any = unsupported_field("engines do not run code of clients")
    custom_logit_processor: Any = unsupported_field("engines do not run code of clients")
    kv_transfer_params: Any = unsupported_field("the gateway arranges transfers itself")
    ec_transfer_params: Any = unsupported_field("the gateway arranges transfers itself")
    bootstrap_host: Any = unsupported_field("the gateway arranges transfers itself")
    bootstrap_port: Any = unsupported_field("the gateway arranges transfers itself")
    bootstrap_room: Any = unsupported_field("the gateway arranges transfers itself")
    session_id: Any = unsupported_field("send the whole conversation; its prefix is cached")
    session_params: Any = unsupported_field("send the whole conversation; its prefix is cached")
    custom_labels: Any = unsupported_field("metrics do not have client-defined labels")
    mm_processor_kwargs: Any = unsupported_field("only text input is accepted")
    media_io_kwargs: Any = unsupported_field("only text input is accepted")
    mm_payload: Any = unsupported_field("only text input is accepted")
    images_config: Any = unsupported_field("only text input is accepted")
    return_mm_kwargs: Any = unsupported_field("only text input is accepted", False)
    return_hidden_states: Any = unsupported_field("workers return tokens only", False)
    return_routed_experts: Any = unsupported_field("workers return tokens only", False)
    routed_experts_start_len: Any = unsupported_field("workers return tokens only", 0)
    routed_experts_prompt_start: Any = unsupported_field("workers return tokens only", 0)
    return_weight_versions: Any = unsupported_field("weights do not change while a model is served", False)
    return_token_offsets: Any = unsupported_field("completions have text_offset in their logprobs", False)
    return_cached_tokens_details: Any = unsupported_field("usage has cached_tokens", False)
    return_spec_tokens_details: Any = unsupported_field("workers do not report them", False)
