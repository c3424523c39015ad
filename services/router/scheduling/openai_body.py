"""Reads the prompt from an OpenAI chat completion or completion body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import orjson

from services.common.errors import SluiceError, invalid
from services.common.media.parts import MediaInput, MediaLimits, take_media
from services.common.packing import pack_u32

PARAM = "prompt.openai_body"
MAX_TOKEN_ID = 2**32 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatBody:
    """Fields of a chat completion that determine the prompt; empty: not given.

    Attributes:
        messages_json: with references to `media` in place of media items.
    """

    messages_json: bytes
    tools_json: bytes = b""
    tool_choice_json: bytes = b""
    template_kwargs_json: bytes = b""
    documents_json: bytes = b""
    chat_template: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    cache_salt: str = ""
    media: tuple[MediaInput, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of its JSON and its media items."""
        texts = self.messages_json, self.tools_json, self.template_kwargs_json, self.documents_json
        return sum(map(len, texts)) + sum(len(item.data) + len(item.url) for item in self.media)


@dataclass(frozen=True, slots=True)
class TextBody:
    """A completion with a text prompt."""

    text: str
    add_special_tokens: bool | None = None
    cache_salt: str = ""

    @property
    def size(self) -> int:
        """Characters of the text."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class TokenBody:
    """A completion with token ids, packed u32."""

    token_ids: bytes
    cache_salt: str = ""

    @property
    def size(self) -> int:
        """Bytes of the token ids."""
        return len(self.token_ids)


Body = ChatBody | TextBody | TokenBody


def read_body(text: bytes) -> Body:
    """Returns the prompt of a body; raises SluiceError (INVALID_ARGUMENT) if it has none.

    Args:
        text: UTF-8 encoded JSON.
    """
    body = parse_object(text)
    if "messages" in body:
        return read_chat(body)
    if "prompt" in body:
        return read_completion(body)
    raise wrong_body("must have messages or prompt")


def parse_object(text: bytes) -> dict[str, Any]:
    """Returns a JSON object; raises SluiceError (INVALID_ARGUMENT) for anything else."""
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:  # stricter than the parsers of engines, such as about lone surrogates
        body = _parse_leniently(text)
    if not isinstance(body, dict):
        raise wrong_body("is not a JSON object")
    return body


def _parse_leniently(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise wrong_body("is not valid JSON") from error


def read_chat(body: Mapping[str, Any]) -> ChatBody:
    """Returns the prompt of a chat completion.

    Raises:
        SluiceError: INVALID_ARGUMENT if a field is malformed, TOO_LARGE for a media item that is.
    """
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise wrong_body("must have a non-empty list of messages")
    messages, media = take_media(messages, MediaLimits())
    kwargs = dict(_field(body, "chat_template_kwargs", dict) or {})
    if (effort := _field(body, "reasoning_effort", str)) is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return ChatBody(
        messages_json=dump_json(messages),
        tools_json=dump_json(_field(body, "tools", list)),
        tool_choice_json=dump_json(body.get("tool_choice")),
        template_kwargs_json=dump_json(kwargs or None),
        documents_json=dump_json(_field(body, "documents", list)),
        chat_template=_field(body, "chat_template", str) or "",
        add_generation_prompt=_field(body, "add_generation_prompt", bool),
        continue_final_message=bool(_field(body, "continue_final_message", bool)),
        cache_salt=_field(body, "cache_salt", str) or "",
        media=tuple(media),
    )


def read_completion(body: Mapping[str, Any]) -> TextBody | TokenBody:
    """Returns the prompt of a completion; raises SluiceError (INVALID_ARGUMENT) if it is not a single one."""
    prompt, salt = body["prompt"], _field(body, "cache_salt", str) or ""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextBody(prompt, _field(body, "add_special_tokens", bool), salt)
    if isinstance(prompt, list) and prompt and all(map(_is_token_id, prompt)):
        return TokenBody(pack_u32(prompt), salt)
    raise wrong_body("must have one prompt: a string or a list of token ids")


def _field(body: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise wrong_body(f"has a {name} that is not a {kind.__name__}")
    return value


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def dump_json(value: Any) -> bytes:
    """Returns a parsed value as JSON; empty for None."""
    if value is None:
        return b""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # lone surrogates, integers above 64 bits
        return json.dumps(value).encode()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def wrong_body(what: str) -> SluiceError:
    """Returns an error about a body."""
    return invalid(f"The openai_body {what}.", param=PARAM)
