"""Maps option names in errors of workers to the fields that the client sent."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.errors import SluiceError
from services.gateway.apis.openai.schemas import GenerationFields
from services.gateway.core.request import GenerationRequest


def client_names(fields: GenerationFields, request: GenerationRequest) -> dict[str, str]:
    """Returns the client's field name of each option whose name differs."""
    names = {"lora": "lora_path", "engine_options": "custom_params" if fields.custom_params else "vllm_xargs"}
    if fields.extra_key:
        names["cache_salt"] = "extra_key"
    for capability, field in request.needs:
        if capability.startswith("guided_") or capability == "structural_tag":
            names["response_format"] = field
    return names


def with_client_name(error: SluiceError, names: Mapping[str, str]) -> SluiceError:
    """Returns the error with the client's name of its field."""
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
