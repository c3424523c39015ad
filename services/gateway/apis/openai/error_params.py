"""Errors of workers speak of the contract's options; clients hear of the fields they sent."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.errors import SluiceError
from services.gateway.apis.openai.schemas import GenerationFields
from services.gateway.core.request import GenerationRequest


def client_names(fields: GenerationFields, request: GenerationRequest) -> dict[str, str]:
    """The client's field of each option that has several names, or none in its API."""
    names = {"lora": "lora_path", "engine_options": "custom_params" if fields.custom_params else "vllm_xargs"}
    if fields.extra_key:
        names["cache_salt"] = "extra_key"
    for capability, field in request.needs:
        if capability.startswith("guided_") or capability == "structural_tag":
            names["response_format"] = field
    return names


def renamed(error: SluiceError, names: Mapping[str, str]) -> SluiceError:
    """The same error with the client's name of the field at fault."""
    name = names.get(error.param)
    if name is None or name == error.param:
        return error
    return SluiceError(
        error.kind,
        error.message.replace(error.param, name),
        param=name,
        code=error.code,
        retry_after_ms=error.retry_after_ms,
        retryable=error.retryable,
    )
