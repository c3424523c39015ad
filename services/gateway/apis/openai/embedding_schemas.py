"""Request schemas of POST /v1/embeddings, and the fields of every request that pools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.gateway.apis.openai.fields import MAX_TOKEN_ID, Label, PromptInput, Strict
from services.gateway.apis.openai.unsupported_fields import platform_field, reject_unsupported, unsupported_field

MAX_INPUTS = 2_048
"""Inputs of an embeddings request, or texts of a score or rerank request; more are refused with INVALID_ARGUMENT."""


def bounded_inputs(value: Any) -> Any:
    """Returns the inputs; raises ValueError for more than MAX_INPUTS."""
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} inputs, more than {MAX_INPUTS}")
    return value


class PoolingFields(Strict):
    """The fields of every request whose texts a model turns into vectors."""

    model: str = Field(min_length=1)
    user: str | None = platform_field()
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    truncation_side: Literal["left", "right"] | None = None
    lora_path: str | None = Field(None, min_length=1, max_length=1024)
    request_id: Label | None = None
    rid: Label | None = None

    @model_validator(mode="after")
    def _truncates(self) -> PoolingFields:
        reject_unsupported(self)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for the context length")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValueError("truncation_side requires truncate_prompt_tokens")
        return self


class EmbeddingRequest(PoolingFields):
    """POST /v1/embeddings."""

    input: Annotated[PromptInput, BeforeValidator(bounded_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=65_536)

    messages: Any = unsupported_field("send texts or token ids as input")
    chat_template: Any = unsupported_field("send texts or token ids as input")
    chat_template_kwargs: Any = unsupported_field("send texts or token ids as input")
    priority: Any = unsupported_field("embedding requests have no priorities", 0)
    cache_salt: Any = unsupported_field("embeddings do not use the prefix cache")
    padding: Any = unsupported_field("inputs are not padded", "do_not_pad")
    embed_dtype: Any = unsupported_field("values are float32", "float32")
    endianness: Any = unsupported_field("values are little-endian", "native", "little")
    use_activation: Any = unsupported_field("the model's files determine it")
    normalize: Any = unsupported_field("the model's files determine it")
    mm_processor_kwargs: Any = unsupported_field("only text input is accepted")
