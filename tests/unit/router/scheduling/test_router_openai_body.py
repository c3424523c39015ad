"""What of an OpenAI body decides the prompt, and what is no body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.apis.prompts import ChatPrompt, TextPrompt, TokenPrompt
from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32
from services.router.scheduling.body_intake import openai_bodies
from services.router.scheduling.request_bodies import ReadBody
from tests.support.oracles.errors import raises_error

MESSAGES = [{"role": "user", "content": "hé\U0001f600"}]


async def read_body(text: bytes) -> ReadBody:
    return await openai_bodies().read(text)


async def test_a_chat_keeps_everything_the_template_sees() -> None:
    body = {
        "model": "m",
        "messages": MESSAGES,
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "documents": [{"title": "t"}],
        "chat_template": "{{ messages }}",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "cache_salt": "salt",
        "temperature": 0.5,
        "max_tokens": 3,
    }
    whole = await read_body(json.dumps(body).encode())
    read = whole.prompt
    assert isinstance(read, ChatPrompt)
    assert json.loads(read.messages_json) == MESSAGES
    assert json.loads(read.tools_json) == body["tools"]
    assert json.loads(read.tool_choice_json) == "none"
    assert json.loads(read.template_kwargs_json) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert json.loads(read.documents_json) == body["documents"]
    assert (read.chat_template, whole.cache_salt) == ("{{ messages }}", "salt")
    assert (read.add_generation_prompt, read.continue_final_message) == (False, True)


async def test_absent_chat_fields_are_empty() -> None:
    assert await read_body(b'{"messages":[{"role":"user"}]}') == ReadBody(ChatPrompt(b'[{"role":"user"}]'))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", ReadBody(TextPrompt("hello"))),
        (["hello"], ReadBody(TextPrompt("hello"))),
        ([1, 2, 3], ReadBody(TokenPrompt(pack_u32([1, 2, 3])))),
        ([[1, 2, 3]], ReadBody(TokenPrompt(pack_u32([1, 2, 3])))),
    ],
)
async def test_a_completion_has_one_prompt_of_text_or_tokens(prompt: Any, expected: ReadBody) -> None:
    assert await read_body(json.dumps({"prompt": prompt}).encode()) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"{}",
        b'{"messages":[]}',
        b'{"messages":"hi"}',
        b'{"messages":[1],"chat_template":5}',
        b'{"messages":[1],"tools":{}}',
        b'{"messages":[NaN]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"prompt":"\\udc00\\ud800"}',
        b'{"prompt":[]}',
        b'{"prompt":["a","b"]}',
        b'{"prompt":[-1]}',
        b'{"prompt":[true]}',
        b'{"prompt":[4294967296]}',
        b'{"prompt":[[1],[2]]}',
        b'{"prompt":5}',
        b"[" * 100_000,
    ],
)
async def test_nonsense_is_refused_in_a_sentence(body: bytes) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="prompt.openai_body") as refused:
        await read_body(body)
    assert refused.value.message.endswith(".")


async def test_images_of_a_chat_become_media_items() -> None:
    url = "data:image/png;base64,QUJD"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    whole = await read_body(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    body = whole.prompt
    assert isinstance(body, ChatPrompt)
    assert json.loads(body.messages_json)[0]["content"] == [{"type": "image", "media": 0}, parts[1]]
    assert [(item.part, item.data) for item in body.media] == [("messages[0].content[0]", b"ABC")]
    assert whole.size == len(body.messages_json) + 3


async def test_broken_image_of_a_chat_is_refused() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}]
    with raises_error(param="messages[0].content[0]", code="invalid_media"):
        await read_body(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
