"""Translates requests of the Responses API to chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.apis.responses.conversation import Conversation
from services.common.apis.responses.prompt import chat_fields
from services.common.apis.responses.tools import ChatTools
from services.gateway.apis.openai.chat_translation import translate_chat
from services.gateway.apis.openai.unsupported_fields import fields_without_effect
from services.gateway.apis.responses.schemas import ContextFields, ResponsesRequest, TextFormat
from services.gateway.core.request import left_out as left_out_reason
from services.gateway.core.request import no_effect
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.runner import TranslatedRequest

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "chat_template_kwargs.reasoning_effort": "reasoning.effort",
    "lora": "lora_path",
    "engine_options": "vllm_xargs",
}
_SAME_NAMES = ("temperature", "top_p", "top_k", "parallel_tool_calls")


def translate(
    fields: ContextFields,
    conversation: Conversation,
    tools: ChatTools,
    request_id: str,
    budgets: BodyBudgets,
    forces_calls: bool,
    left_out: Sequence[str] = (),
) -> TranslatedRequest:
    """Returns the chat request that a response request translates to.

    Args:
        forces_calls: the model's engines support structured output, which enforces required tool calls.
        left_out: kinds of the tools and items that the model does not get.

    Raises:
        SluiceError: INVALID_ARGUMENT for invalid or unsupported fields, named as in the client's API.
    """
    logprobs = "top_logprobs" if getattr(fields, "top_logprobs", None) is not None else "include"
    field_names = FieldNameMap(
        {**_NAMES, "logprobs": logprobs},
        conversation.paths,
        tools.paths,
        {"function.name": "name", "function.parameters": "parameters"},
        parts=conversation.parts,
    )
    degraded = [*map(no_effect, fields_without_effect(fields)), *map(left_out_reason, left_out)]
    return translate_chat(_chat(fields, conversation, tools), field_names, request_id, budgets, forces_calls, degraded)


def _chat(fields: ContextFields, conversation: Conversation, tools: ChatTools) -> dict[str, Any]:
    effort = fields.reasoning.effort if fields.reasoning is not None else None
    body = {"model": fields.model, **chat_fields(conversation, tools, effort)}
    if fields.text is not None and fields.text.format is not None:
        body["response_format"] = _format(fields.text.format)
    if isinstance(fields, ResponsesRequest):
        body |= _sampling(fields)
    return body


def _sampling(fields: ResponsesRequest) -> dict[str, Any]:
    body = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.max_output_tokens is not None:
        body["max_completion_tokens"] = fields.max_output_tokens
    if fields.stop:
        body["stop"] = list(fields.stop)
    if fields.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": fields.logprobs}
    return {**body, **fields.extensions()}


def _format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    json_schema: dict[str, Any] = {"name": form.name, "schema": form.schema_document}
    if form.description is not None:
        json_schema["description"] = form.description
    if form.strict is not None:
        json_schema["strict"] = form.strict
    return {"type": "json_schema", "json_schema": json_schema}
