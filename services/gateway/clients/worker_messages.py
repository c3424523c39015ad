"""Builds the parts of a worker's GenerateRequest."""

from __future__ import annotations

import orjson

from services.common.rpc.media import span_messages
from services.gateway.core.request import ChatPrompt, TokenizedPrompt
from sluice.v1 import worker_pb2


def token_prompt(prompt: TokenizedPrompt) -> worker_pb2.TokenPrompt:
    """Returns the message of a prompt of token ids, with the spans of its media items."""
    media = span_messages(item.span for item in prompt.media) if prompt.media else None
    return worker_pb2.TokenPrompt(token_ids=prompt.token_ids, media=media)


def chat_body(prompt: ChatPrompt) -> bytes:
    """Returns an OpenAI request body with the fields that determine the prompt."""
    opens = prompt.add_generation_prompt
    parts = {
        b"messages": prompt.messages_json,
        b"tools": prompt.tools_json,
        b"tool_choice": prompt.tool_choice_json,
        b"chat_template_kwargs": prompt.template_kwargs_json,
        b"documents": prompt.documents_json,
        b"chat_template": orjson.dumps(prompt.chat_template) if prompt.chat_template else b"",
        b"continue_final_message": b"true" if prompt.continue_final_message else b"",
        b"add_generation_prompt": b"" if opens is None else orjson.dumps(opens),
    }
    return b"{%b}" % b",".join(b'"%b":%b' % part for part in parts.items() if part[1])
