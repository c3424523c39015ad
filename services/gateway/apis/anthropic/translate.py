"""A request of the Messages API as a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.common.errors import SluiceError
from services.gateway.apis.anthropic.blocks import Chat, read_chat
from services.gateway.apis.anthropic.schemas import MessagesRequest, PromptFields
from services.gateway.apis.anthropic.tools import Tools, read_tools
from services.gateway.apis.common.field_reader import FieldNameMap
from services.gateway.apis.openai.schemas import ChatCompletionRequest
from services.gateway.apis.openai.translate import chat_request
from services.gateway.apis.openai.validation import check
from services.gateway.core.request import GenerationRequest
from services.gateway.http.body_budgets import BodyBudgets

SWITCH = ("enable_thinking", "thinking")
"""What templates call the switch of a model's thinking."""

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs.reasoning_effort": "output_config.effort",
    **{f"chat_template_kwargs.{name}": "thinking.type" for name in SWITCH},
    "thinking_token_budget": "thinking.budget_tokens",
    "lora": "lora_path",
    "engine_options": "vllm_xargs",
}
_OF_TOOL = {
    "function.name": "name",
    "function.parameters": "input_schema",
}


@dataclass(frozen=True, slots=True)
class Able:
    """What the engines of a model can do: follow schemas, and bound thinking."""

    guided: bool
    budget: bool


@dataclass(frozen=True, slots=True)
class Translated:
    """A generation and how its errors are put into the client's words."""

    generation: GenerationRequest
    field_names: FieldNameMap

    def rename_fields(self, error: SluiceError) -> SluiceError:
        """The same error in the client's words, in which it names its field: the body has no other place for that."""
        said = self.field_names.of(error)
        message = said.message
        if said.code in ("context_length_exceeded", "prompt_too_large") and said.param == "messages":
            message = f"prompt is too long: {message}"
        elif said.param and said.param not in message:
            message = f"{said.param}: {message}"
        return SluiceError(
            said.kind,
            message,
            param=said.param,
            code=said.code,
            retry_after_ms=said.retry_after_ms,
            retryable=said.retryable,
        )


def translate(
    fields: PromptFields, request_id: str, able: Able, budgets: BodyBudgets, switched: bool = True
) -> Translated:
    """The chat that a request comes to.

    Args:
        switched: the model's template hears whether the model shall think.

    Raises:
        SluiceError: INVALID_ARGUMENT names what cannot be honoured, in the client's words.
    """
    tools = read_tools(fields.tools, fields.tool_choice, budgets.list_items)
    chat = read_chat(fields.system, fields.messages, budgets.list_items)
    field_names = FieldNameMap(chat.paths, [f"tools.{index}" for index in range(len(tools.chat))], _OF_TOOL, _NAMES)
    body = _chat(fields, chat, tools, able, switched)
    try:
        checked = check(ChatCompletionRequest, body, budgets)
        made = chat_request(body, checked, request_id, 1, budgets, able.guided)
    except SluiceError as error:
        raise field_names.of(error) from None
    return Translated(made, field_names)


def thinks(fields: PromptFields) -> bool:
    """Whether the model shall think, and the client hear of it: only when it is asked for."""
    return fields.thinking is not None and fields.thinking.type != "disabled"


def _chat(fields: PromptFields, chat: Chat, tools: Tools, able: Able, switched: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": fields.model, "messages": chat.messages}
    if chat.continues:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools.chat:
        body["tools"] = tools.chat
    if tools.choice is not None:
        body["tool_choice"] = tools.choice
    if not tools.parallel:
        body["parallel_tool_calls"] = False
    config = fields.output_config
    if config is not None and config.effort is not None:
        body["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        named = {"name": "answer", "schema": config.format.schema_document}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    if isinstance(fields, MessagesRequest):
        body |= _sampling(fields, able)
    if switched:
        kwargs = dict.fromkeys(SWITCH, thinks(fields)) | body.get("chat_template_kwargs", {})
        body["chat_template_kwargs"] = kwargs
    return body


def _sampling(fields: MessagesRequest, able: Able) -> dict[str, Any]:
    body: dict[str, Any] = {"max_completion_tokens": fields.max_tokens, **fields.extensions()}
    if fields.stop_sequences:
        body["stop"] = fields.stop_sequences
    if fields.temperature is not None:
        body["temperature"] = fields.temperature
    if fields.top_p:  # 0 leaves one token, as a temperature of 0 does
        body["top_p"] = fields.top_p
    elif fields.top_p == 0:
        body["top_k"] = 1
    if fields.top_k:  # 0: all tokens
        body["top_k"] = fields.top_k
    if fields.thinking is not None and fields.thinking.budget_tokens is not None and able.budget:
        body["thinking_token_budget"] = fields.thinking.budget_tokens
    return body
