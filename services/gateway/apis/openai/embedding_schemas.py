"""Requests for embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.gateway.apis.openai.fields import MAX_TOKEN_ID, Label, PromptInput, Strict
from services.gateway.apis.openai.unsupported_fields import refuse, refused

MAX_INPUTS = 2_048


def _inputs(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"holds {len(value)} inputs, more than {MAX_INPUTS}")
    return value


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    model: str = Field(min_length=1)
    input: Annotated[PromptInput, BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=65_536)
    user: str | None = None

    # Customary extensions of the engines.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    truncation_side: Literal["left", "right"] | None = None
    lora_path: str | None = Field(None, min_length=1, max_length=1024)
    request_id: Label | None = None
    rid: Label | None = None

    messages: Any = refused("give texts or token ids as input")
    chat_template: Any = refused("give texts or token ids as input")
    chat_template_kwargs: Any = refused("give texts or token ids as input")
    priority: Any = refused("embeddings are computed as they come", 0)
    cache_salt: Any = refused("embeddings do not use the prefix cache")
    padding: Any = refused("inputs are not padded", "do_not_pad")
    embed_dtype: Any = refused("values are float32", "float32")
    endianness: Any = refused("values are little-endian", "native", "little")
    use_activation: Any = refused("the engine does what the model's files say")
    normalize: Any = refused("the engine does what the model's files say")
    mm_processor_kwargs: Any = refused("models here read text")

    @model_validator(mode="after")
    def _fits_together(self) -> EmbeddingRequest:
        refuse(self)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for what fits into the context")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValueError("truncation_side needs truncate_prompt_tokens")
        return self
