"""Generation requests of APIs that are translated to chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from services.common.base.errors import SluiceError
from services.common.types.media.parts import MediaInput
from services.gateway.apis.openai.schemas import ChatCompletionRequest
from services.gateway.apis.openai.translate import chat_request
from services.gateway.apis.openai.validation import check
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.runner import TranslatedRequest


def translate_chat(
    body: dict[str, Any],
    field_names: FieldNameMap,
    request_id: str,
    budgets: BodyBudgets,
    forces_calls: bool,
    degraded: Iterable[str] = (),
    media: Sequence[MediaInput] | None = None,
) -> TranslatedRequest:
    """Returns the generation request of a chat completion with one choice.

    Args:
        forces_calls: the model's engines support structured output, which enforces required tool calls.
        degraded: what the answer will lack of the client's request.
        media: the items that references in the messages stand for; None: the messages contain the items themselves.

    Raises:
        SluiceError: INVALID_ARGUMENT for invalid or unsupported fields, named as in the client's API.
    """
    try:
        fields = check(ChatCompletionRequest, body, budgets)
        request = chat_request(body, fields, request_id, 1, budgets, forces_calls, media)
        reasons = tuple(dict.fromkeys((*request.degraded, *degraded)))
        template_fields = tuple((argument, field_names.param(field)) for argument, field in request.template_fields)
        return TranslatedRequest(replace(request, degraded=reasons, template_fields=template_fields), field_names)
    except SluiceError as error:
        raise field_names.rename(error) from None
