"""A short way to the ids of plain conversations, which are nearly all there are.

mistral-common builds, checks, copies and finally decodes a tree of models for every request. For text-only turns in
the usual order the ids are the turns' own ids between a few control tokens; this puts them together directly. A
self-check at load compares with mistral-common and switches the short way off at the first difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from services.preprocess.tokenizer import ChatRequest, Message

log = logging.getLogger(__name__)

MAX_CHARS = 64 << 10
"""Longer texts take the long way, which survives inputs that the fast encoder panics on."""

_JOIN = "\n\n"
_CHECKS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Hello, world!"),),
    (("user", ""),),
    (("system", "Be brief."), ("user", "  Grüße 😀\n\n"), ("assistant", "Yes.  "), ("user", "[INST] </s> <s>")),
    (("user", "a"), ("assistant", " b\n"), ("user", "c"), ("assistant", "d "), ("user", "e")),
    (("system", "x"), ("user", "a"), ("assistant", "b"), ("user", "1234567890 \t tabs")),
)


class PlainEncoder:
    """Ids of conversations of the form ``[system] user (assistant user)*`` with text and nothing else.

    Args:
        encode: text to ids without control tokens.
        ids: of BOS, EOS, the start and the end of a user's turn.
    """

    def __init__(self, encode: Callable[[str], list[int]], ids: tuple[int, int, int, int]) -> None:
        self._encode = encode
        self._bos, self._eos, self._begin, self._end = ids

    @classmethod
    def for_tokenizer(cls, tokenizer: MistralTokenizer[Any, Any, Any, Any, Any]) -> PlainEncoder | None:
        """The encoder for a tokenizer, or None where it would not give the same ids."""
        text = tokenizer.instruct_tokenizer.tokenizer
        if not isinstance(text, Tekkenizer):
            return None
        offset = text.num_special_tokens
        encode = text._model.encode_ordinary
        plain = cls(
            lambda string: [token + offset for token in encode(string)],
            (
                text.bos_id,
                text.eos_id,
                text.get_special_token(SpecialTokens.begin_inst.value),
                text.get_special_token(SpecialTokens.end_inst.value),
            ),
        )
        if plain._agrees_with(tokenizer):
            return plain
        log.info("chats take mistral-common's own way: the short one differs for this tokenizer")
        return None

    def _agrees_with(self, tokenizer: MistralTokenizer[Any, Any, Any, Any, Any]) -> bool:
        for turns in _CHECKS:
            messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
            try:
                request = ChatCompletionRequest.from_openai(messages)
                expected = tokenizer.encode_chat_completion(request).tokens
            except (MistralCommonException, ValueError):
                return False
            if self.encode(ChatRequest(messages)) != expected:
                return False
        return True

    def encode(self, chat: ChatRequest) -> list[int] | None:
        """The ids, or None when the chat is not plain."""
        if chat.tools or chat.template_kwargs or chat.chat_template or chat.documents or chat.continue_final_message:
            return None
        messages = chat.messages
        system = ""
        if messages[0]["role"] == "system":
            if not _is_text(messages[0]) or not messages[0]["content"]:
                return None
            system = messages[0]["content"] + _JOIN
            messages = messages[1:]
        if not _alternate(messages) or _length(chat.messages) > MAX_CHARS:
            return None
        encode = self._encode
        ids = [self._bos]
        last = len(messages) - 1
        for index, message in enumerate(messages):
            content = message["content"]
            if index % 2:
                ids += encode(content.rstrip(" "))
                ids.append(self._eos)
            else:
                ids.append(self._begin)
                ids += encode(system + content if index == last else content)
                ids.append(self._end)
        return ids


def _length(messages: Iterable[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content"), str)


def _alternate(messages: Iterable[Message]) -> bool:
    """Whether user and assistant take turns, user first and last, with text and nothing else."""
    index = -1
    for index, message in enumerate(messages):
        if not _is_text(message):
            return False
        if index % 2:
            if message["role"] != "assistant" or not message["content"] or message.get("tool_calls"):
                return False
        elif message["role"] != "user":
            return False
    return index >= 0 and not index % 2
