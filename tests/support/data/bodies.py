"""Request bodies as the gateway reads them, from bytes to what goes into the pipeline, without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from services.common.apis.responses.conversation import conversation
from services.common.apis.responses.items import read_items
from services.common.apis.responses.tools import read_tools
from services.common.net.intake.json_values import check_values
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest
from services.gateway.apis.openai.schema_meter import SchemaMeter
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.token_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.apis.openai.translate import chat_request, completion_requests, count_tools
from services.gateway.apis.openai.validation import check
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.settings import GatewaySettings

BUDGETS = GatewaySettings().budgets
"""Those of a gateway without flags."""

Read = Callable[[dict[str, Any], BodyBudgets], object]


def _chat(body: dict[str, Any], budgets: BodyBudgets) -> object:
    fields = check(ChatCompletionRequest, body, budgets)
    return chat_request(body, fields, "chatcmpl-1", 16, budgets, forces_calls=True)


def _completions(body: dict[str, Any], budgets: BodyBudgets) -> object:
    return completion_requests(check(CompletionRequest, body, budgets), "cmpl-1", 16, budgets)


def _tokenize(body: dict[str, Any], budgets: BodyBudgets) -> object:
    fields = check(TokenizeRequest, body, budgets)
    count_tools(fields.tools, SchemaMeter(budgets))
    return fields


def _responses(body: dict[str, Any], budgets: BodyBudgets) -> object:
    # an extension, without which the other bodies are read
    from services.gateway.apis.responses.schemas import ResponsesRequest
    from services.gateway.apis.responses.translate import translate as translate_response

    fields = check(ResponsesRequest, body, budgets)
    tools = read_tools(fields.tools, fields.tool_choice, budgets.list_items)
    chat = conversation(fields.instructions, read_items(fields.input, budgets.list_items).items)
    return translate_response(fields, chat, tools, "resp_1", budgets, forces_calls=True).generation


def _messages(body: dict[str, Any], budgets: BodyBudgets) -> object:
    from services.gateway.apis.anthropic.schemas import MessagesRequest, explain
    from services.gateway.apis.anthropic.translate import EngineCapabilities
    from services.gateway.apis.anthropic.translate import translate as translate_message

    fields = check(MessagesRequest, body, budgets, explain)
    return translate_message(
        fields, "msg_1", EngineCapabilities(structured_output=True, thinking_budget=True), budgets
    ).generation


_READERS: dict[str, Read] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/embeddings": lambda body, budgets: check(EmbeddingRequest, body, budgets),
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/tokenize": _tokenize,
    "/detokenize": lambda body, budgets: check(DetokenizeRequest, body, budgets),
}


def read(path: str, body: bytes, budgets: BodyBudgets = BUDGETS) -> object:
    """Returns what a body of an endpoint comes to; SluiceError names what is wrong with it."""
    check_values(body, budgets.values)
    return _READERS[path](orjson.loads(body), budgets)
