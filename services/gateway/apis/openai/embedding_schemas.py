"""Request schema of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.gateway.apis.openai.fields import MAX_TOKEN_ID, Label, PromptInput, Strict
from services.gateway.apis.openai.unsupported_fields import reject_unsupported, unsupported_field

MAX_INPUTS = 2_048


def _inputs(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} inputs, more than {MAX_INPUTS}")
    return value


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    model: str = Field(min_length=1)
    input: Annotated[PromptInput, BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=65_536)
    user: str | None = None

    # Extensions of vLLM and SGLang.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    truncation_side: Literal["left", "right"] | None = None
    lora_path: str | None = Field(None, min_length=1, max_length=1024)
    request_id: Label | None = None
    rid: Label | None = None

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

    @model_validator(mode="after")
    def _fits_together(self) -> EmbeddingRequest:
        reject_unsupported(self)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for the context length")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValueError("truncation_side requires truncate_prompt_tokens")
        return self
