"""Engine-specific fields that every API of the gateway accepts, named as in chat completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from services.gateway.apis.openai.fields import MAX_TOKEN_ID, JsonObject, Priority, Strict, TokenId


class EngineExtensions(Strict):
    """Extension fields beyond the API's own, with the same meaning as in chat completions."""

    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=2**31, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024, fail_fast=True)
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    lora_path: str | None = Field(None, min_length=1, max_length=1024)
    chat_template_kwargs: JsonObject = None
    vllm_xargs: JsonObject = None
    request_id: Annotated[str, Field(max_length=512)] | None = None

    def extensions(self) -> dict[str, Any]:
        """Returns the fields that are set, by their chat completion names."""
        return {name: value for name in EngineExtensions.model_fields if (value := getattr(self, name)) is not None}
