"""Translates requests of the Messages API to chat requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from services.common.apis.anthropic.blocks import Chat, read_chat
from services.common.apis.anthropic.prompt import chat_fields
from services.common.apis.anthropic.tools import ChatTools, read_tools
from services.common.apis.prompts import THINKING_SWITCHES
from services.common.base.errors import SluiceError, with_field
from services.gateway.apis.anthropic.schemas import MessagesRequest, PromptFields
from services.gateway.apis.openai.chat_translation import translate_chat
from services.gateway.apis.openai.unsupported_fields import fields_without_effect
from services.gateway.core.request import left_out, no_effect
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.runner import TranslatedRequest

SWITCH = "thinking.type"
"""The client's name of these switches."""

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs.reasoning_effort": "output_config.effort",
    **{f"chat_template_kwargs.{name}": SWITCH for name in THINKING_SWITCHES},
    "thinking_token_budget": "thinking.budget_tokens",
    "lora": "lora_path",
    "engine_options": "vllm_xargs",
}
_OF_TOOL = {
    "function.name": "name",
    "function.parameters": "input_schema",
}


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Whether a model's engines support structured output and a thinking budget."""

    structured_output: bool
    thinking_budget: bool


class MessageFieldNames(FieldNameMap):
    """Maps field names to those of a message request."""

    def rename(self, error: SluiceError) -> SluiceError:
        """Returns the error with the client's field name in its message, as Anthropic's error body has no `param`."""
        renamed = super().rename(error)
        message = renamed.message
        if renamed.code in ("context_length_exceeded", "prompt_too_large") and renamed.param == "messages":
            message = f"prompt is too long: {message}"
        elif renamed.param and renamed.param not in message:
            message = f"{renamed.param}: {message}"
        return renamed if message == renamed.message else with_field(renamed, renamed.param, message)


def translate(
    fields: PromptFields, request_id: str, capabilities: EngineCapabilities, budgets: BodyBudgets, switched: bool = True
) -> TranslatedRequest:
    """Returns the chat request that a message request translates to.

    Args:
        switched: pass the switch for thinking to the chat template.

    Raises:
        SluiceError: INVALID_ARGUMENT for invalid or unsupported fields, named as in the client's API.
    """
    chat = read_chat(fields.system, fields.messages, budgets.list_items, budgets.media)
    tools = read_tools(fields.tools, fields.tool_choice, chat.references, budgets.list_items)
    field_names = MessageFieldNames(_NAMES, chat.paths, tools.paths, _OF_TOOL, parts=chat.parts)
    body = _chat(fields, chat, tools, capabilities, switched)
    degraded = [*map(no_effect, fields_without_effect(fields)), *map(left_out, (*tools.left_out, *chat.left_out))]
    forces_calls = capabilities.structured_output
    translated = translate_chat(body, field_names, request_id, budgets, forces_calls, degraded, chat.media)
    return translated if thinks(fields) else _without_switch_report(translated)


def thinks(fields: PromptFields) -> bool:
    """Returns whether the request enables thinking, and thinking blocks in the response."""
    return fields.thinking is not None and fields.thinking.type != "disabled"


def _without_switch_report(translated: TranslatedRequest) -> TranslatedRequest:
    """Returns a request that thinking was not requested for: a switch without effect is not reported then."""
    reported = tuple(pair for pair in translated.generation.template_fields if pair[1] != SWITCH)
    return replace(translated, generation=replace(translated.generation, template_fields=reported))


def _chat(
    fields: PromptFields, chat: Chat, tools: ChatTools, capabilities: EngineCapabilities, switched: bool
) -> dict[str, Any]:
    config = fields.output_config
    effort = config.effort if config is not None else None
    body: dict[str, Any] = {"model": fields.model}
    if isinstance(fields, MessagesRequest):
        body |= _sampling(fields, capabilities)
    body |= chat_fields(chat, tools, effort, thinks(fields) if switched else None, body.get("chat_template_kwargs", {}))
    if not tools.parallel:
        body["parallel_tool_calls"] = False
    if config is not None and config.format is not None:
        json_schema = {"name": "answer", "schema": config.format.schema_document}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return body


def _sampling(fields: MessagesRequest, capabilities: EngineCapabilities) -> dict[str, Any]:
    body: dict[str, Any] = {"max_completion_tokens": fields.max_tokens, **fields.extensions()}
    if fields.stop_sequences:
        body["stop"] = fields.stop_sequences
    if fields.temperature is not None:
        body["temperature"] = fields.temperature
    if fields.top_p:  # 0 means greedy decoding, which engines express as top_k 1
        body["top_p"] = fields.top_p
    elif fields.top_p == 0:
        body["top_k"] = 1
    if fields.top_k:  # 0 means all tokens
        body["top_k"] = fields.top_k
    if fields.thinking is not None and fields.thinking.budget_tokens is not None and capabilities.thinking_budget:
        body["thinking_token_budget"] = fields.thinking.budget_tokens
    return body
