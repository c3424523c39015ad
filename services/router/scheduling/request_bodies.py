"""Reads the prompt of a request body, as the gateway does, and decides what becomes of one that it would refuse.

The endpoints behind the picker may take what the gateway refuses, so that such a request is routed by load alone; a
body that none of them can take is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any, TypeVar

from services.common.apis.anthropic.prompt import read_chat as read_messages
from services.common.apis.prompts import ChatPrompt, TextPrompt, TokenPrompt, chat_prompt
from services.common.apis.responses.prompt import read_chat as read_responses
from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.base.packing import pack_u32
from services.common.types.media.parts import MediaLimits, take_media

PARAM = "prompt.openai_body"
MAX_LIST_ITEMS = 10_000
"""Items of a list in a body of the Responses or Messages API; one with more is routed by load alone."""
LIST_ITEMS = Budget("list_items", MAX_LIST_ITEMS, "")
_MEDIA = MediaLimits()
_REFUSED_MEDIA = frozenset({"invalid_media", "too_many_media"})

T = TypeVar("T")


class Api(Enum):
    """API of a request, from its path."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"


_PATHS = {
    "/chat/completions": Api.CHAT,
    "/completions": Api.COMPLETION,
    "/responses": Api.RESPONSES,
    "/messages": Api.MESSAGES,
    "/messages/count_tokens": Api.MESSAGES,
    "/embeddings": Api.EMBEDDINGS,
}
_USUAL = {f"/v1{path}": api for path, api in _PATHS.items()}


@dataclass(frozen=True, slots=True)
class ReadBody:
    """The prompt of a body, with the salt of its blocks."""

    prompt: ChatPrompt | TextPrompt | TokenPrompt
    cache_salt: str = ""

    @property
    def size(self) -> int:
        """Bytes that it holds, about."""
        return self.prompt.held


@dataclass(frozen=True, slots=True)
class RefusedBody:
    """A body that the gateway would refuse.

    Attributes:
        error: as the gateway would answer.
        size: of its text, bytes.
    """

    error: SluiceError
    size: int
    cache_salt: str = ""


AnyBody = ReadBody | RefusedBody


def api_of(path: str) -> Api | None:
    """Returns the API that a path such as ``/v1/chat/completions`` belongs to; None for others."""
    if (known := _USUAL.get(path)) is not None:
        return known
    path = path.partition("?")[0].rstrip("/")
    return next((api for suffix, api in _PATHS.items() if path.endswith(suffix)), None)


def read_body(body: Mapping[str, Any]) -> ReadBody:
    """Returns the prompt of a chat completion or completion.

    Raises:
        SluiceError: INVALID_ARGUMENT if it has none, or a field is malformed; TOO_LARGE for a media item that is.
    """
    if "messages" in body:
        return _chat(body)
    if "prompt" in body:
        return _completion(body)
    raise _wrong("must have messages or prompt")


def read_prompt(body: Mapping[str, Any], api: Api | None, size: int = 0) -> AnyBody | None:
    """Returns the prompt of a body of any API, or None if it has none that can be read.

    Args:
        api: None: the API follows from the body's fields.
        size: of the body's text, bytes; of which a prompt is that cannot be read.

    Raises:
        SluiceError: INVALID_ARGUMENT if the prompt is malformed, or has a broken media item.
    """
    if api is Api.MESSAGES:
        return _of_agent(body, api, "messages", size)
    if api is Api.RESPONSES or (api is None and "input" in body and "messages" not in body):
        return _of_agent(body, Api.RESPONSES, "input", size)
    if api is Api.EMBEDDINGS and "messages" not in body:
        text = _as_one(body.get("input"))
        return None if text is None else _completion({"prompt": text})
    if "messages" in body:
        return _chat(body)
    return _completion({**body, "prompt": _as_one(body["prompt"])}) if "prompt" in body else None


def has_several_prompts(body: Mapping[str, Any]) -> bool:
    """Returns whether a completion has more than one prompt."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _of_agent(body: Mapping[str, Any], api: Api, name: str, size: int) -> AnyBody:
    _check_turns(body.get(name), name, text=api is Api.RESPONSES)
    try:
        if api is Api.MESSAGES:
            chat, media = read_messages(body, LIST_ITEMS, _MEDIA)
            return ReadBody(chat_prompt(chat, chat["messages"], media), _salt(body))
        chat = read_responses(body, LIST_ITEMS)
        return ReadBody(chat_prompt(chat, *take_media(chat["messages"], _MEDIA)), _salt(body))
    except SluiceError as error:
        if error.kind is ErrorKind.TOO_LARGE or error.code in _REFUSED_MEDIA:
            raise
        return RefusedBody(error, size)


def _check_turns(turns: Any, name: str, *, text: bool) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) unless the turns are a list of objects, or a text where that is allowed."""
    if text and isinstance(turns, str | None):
        return
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise _wrong(f"must have a non-empty list of objects as its {name}")


def _chat(body: Mapping[str, Any]) -> ReadBody:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise _wrong("must have a non-empty list of messages")
    messages, media = take_media(messages, _MEDIA)
    if not _NAMES.isdisjoint(body):
        for name, kind in _KINDS.items():
            _field(body, name, kind)
    return ReadBody(chat_prompt(body, messages, media), _salt(body))


_KINDS: dict[str, type] = {
    "chat_template_kwargs": dict,
    "reasoning_effort": str,
    "enable_thinking": bool,
    "tools": list,
    "documents": list,
    "chat_template": str,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
}
_NAMES = frozenset(_KINDS)


def _completion(body: Mapping[str, Any]) -> ReadBody:
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return ReadBody(TextPrompt(prompt, _field(body, "add_special_tokens", bool)), _salt(body))
    if isinstance(prompt, list) and prompt and (ids := _token_ids(prompt)):
        return ReadBody(TokenPrompt(ids), _salt(body))
    raise _wrong("must have one prompt: a string or a list of token ids")


def _as_one(prompts: Any) -> Any:
    """Returns several prompts as one of their total length, which is what a request with them adds to a worker."""
    if not isinstance(prompts, list) or len(prompts) < 2:
        return prompts
    if all(isinstance(prompt, str) for prompt in prompts):
        return "".join(prompts)
    return list(chain.from_iterable(prompts)) if all(isinstance(prompt, list) for prompt in prompts) else prompts


def _salt(body: Mapping[str, Any]) -> str:
    if "cache_salt" not in body and "extra_key" not in body:
        return ""
    return _field(body, "cache_salt", str) or _field(body, "extra_key", str) or ""


def _field(body: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise _wrong(f"has a {name} that is not a {kind.__name__}")
    return value


def _token_ids(values: list[Any]) -> bytes:
    """Returns token ids as packed u32; empty if a value is none. Prompts of a million ids take 20 ms."""
    if set(map(type, values)) != {int}:
        return b""
    try:
        return pack_u32(values)
    except OverflowError:
        return b""


def _wrong(what: str) -> SluiceError:
    return invalid(f"The openai_body {what}.", param=PARAM)
