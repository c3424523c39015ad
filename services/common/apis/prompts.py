"""Prompts that request bodies are read into, and what of a chat decides its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.types.media.parts import MediaInput

TEMPLATE_HINTS = ("enable_thinking", "reasoning_effort")
"""Fields of a chat that are arguments of its template."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Names under which chat templates take the switch for thinking."""


_OPTIONS = frozenset(
    (
        "tools",
        "tool_choice",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        *TEMPLATE_HINTS,
    )
)
"""Fields of a chat, besides its messages, that decide its prompt."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, as the JSON that the client sent; references in the messages stand for the media items."""

    messages_json: bytes
    tools_json: bytes = b""
    tool_choice_json: bytes = b""
    template_kwargs_json: bytes = b""
    chat_template: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents_json: bytes = b""
    media: tuple[MediaInput, ...] = ()

    @property
    def held(self) -> int:
        """Bytes of its JSON and its media items."""
        texts = self.messages_json, self.tools_json, self.template_kwargs_json, self.documents_json
        items = sum(len(item.data) + len(item.url) for item in self.media) if self.media else 0
        return sum(map(len, texts)) + items


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt of plain text."""

    text: str
    add_special_tokens: bool | None = None
    second_text: str = ""  # encoded with `text` as a pair; empty for none

    @property
    def held(self) -> int:
        """Characters of the text."""
        return len(self.text) + len(self.second_text)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of token ids, packed u32."""

    token_ids: bytes

    @property
    def held(self) -> int:
        """Bytes of the token ids."""
        return len(self.token_ids)


def chat_prompt(body: Mapping[str, Any], messages: Sequence[Any], media: Sequence[MediaInput]) -> ChatPrompt:
    """Returns the prompt of a chat completion whose fields have the right types.

    Args:
        body: `messages` is not read.
        messages: those of the body, with references to `media` in place of media items.
    """
    if _OPTIONS.isdisjoint(body):
        return ChatPrompt(orjson.dumps(messages), media=tuple(media))
    return ChatPrompt(
        messages_json=orjson.dumps(messages),
        tools_json=dump_json(body.get("tools")),
        tool_choice_json=dump_json(body.get("tool_choice")),
        template_kwargs_json=dump_json(template_kwargs(body)),
        chat_template=body.get("chat_template") or "",
        add_generation_prompt=body.get("add_generation_prompt"),
        continue_final_message=bool(body.get("continue_final_message")),
        documents_json=dump_json(body.get("documents")),
        media=tuple(media),
    )


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of the chat template: those of the client, over the fields that are arguments too."""
    hints = {name: value for name in TEMPLATE_HINTS if (value := body.get(name)) is not None}
    return {**implied_switches(body), **hints, **(body.get("chat_template_kwargs") or {})} or None


def implied_switches(body: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the switch for thinking, under all its names, as set by an effort; empty if the client sets one itself.

    Many templates have a switch and no effort, so that "none" would have no effect.
    """
    effort, kwargs = body.get("reasoning_effort"), body.get("chat_template_kwargs") or {}
    if effort is None or body.get("enable_thinking") is not None or any(name in kwargs for name in THINKING_SWITCHES):
        return {}
    return dict.fromkeys(THINKING_SWITCHES, effort != "none")


def continued(continues: bool) -> dict[str, bool]:
    """Returns the fields of a chat whose last message the model continues; none for others."""
    return {"continue_final_message": True, "add_generation_prompt": False} if continues else {}


def dump_json(value: Any) -> bytes:
    """Returns a parsed value as JSON; empty for None."""
    return b"" if value is None else orjson.dumps(value)
