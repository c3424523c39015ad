"""Maps option names in errors of workers to the fields that the client sent."""

from __future__ import annotations

from services.gateway.apis.common.field_names import FieldNameMap
from services.gateway.apis.openai.schemas import GenerationFields
from services.gateway.core.request import GenerationRequest


def client_names(fields: GenerationFields, request: GenerationRequest) -> FieldNameMap:
    """Returns the client's names of the options whose names differ."""
    names = {"lora": "lora_path", "engine_options": "custom_params" if fields.custom_params else "vllm_xargs"}
    if fields.extra_key:
        names["cache_salt"] = "extra_key"
    for capability, field in request.needs:
        if field != "response_format" and (capability.startswith("guided_") or capability == "structural_tag"):
            names["response_format"] = field
    return FieldNameMap(names)
