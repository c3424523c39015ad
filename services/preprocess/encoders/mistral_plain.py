"""A fast path to the ids of plain conversations, which are the vast majority.

mistral-common builds, validates, copies and finally decodes a tree of models for every request. For text-only turns in
the usual order, the ids are those of the turns between a few control tokens; this module joins them directly. A
self-check at load compares the results with mistral-common and disables the fast path at the first difference.
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

from services.common.base.packing import pack_u32
from services.preprocess.contract.tokenizer import ChatRequest, Message

log = logging.getLogger(__name__)

_JOIN = "\n\n"
_CHECKS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Hello, world!"),),
    (("user", ""),),
    (("system", "Be brief."), ("user", "  Grüße 😀\n\n"), ("assistant", "Yes.  "), ("user", "[INST] </s> <s>")),
    (("user", "a"), ("assistant", " b\n"), ("user", "c"), ("assistant", "d "), ("user", "e")),
    (("system", "x"), ("user", "a"), ("assistant", "b"), ("user", "1234567890 \t tabs")),
)


class PlainEncoder:
    """Encodes conversations of the form ``[system] user (assistant user)*`` with only text.

    Args:
        pack: encodes texts to packed ids without control tokens.
        ids: ids of BOS, EOS, and the start and end of a user turn.
    """

    def __init__(self, pack: Callable[[list[str]], list[bytes]], ids: tuple[int, int, int, int]) -> None:
        self._pack = pack
        self._bos, self._eos, self._begin, self._end = (pack_u32([token]) for token in ids)

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: MistralTokenizer[Any, Any, Any, Any, Any],
        pack: Callable[[list[str]], list[bytes]],
    ) -> PlainEncoder | None:
        """Returns the encoder for a tokenizer, or None where its ids would differ."""
        text = tokenizer.instruct_tokenizer.tokenizer
        if not isinstance(text, Tekkenizer):
            return None
        plain = cls(
            pack,
            (
                text.bos_id,
                text.eos_id,
                text.get_special_token(SpecialTokens.begin_inst.value),
                text.get_special_token(SpecialTokens.end_inst.value),
            ),
        )
        if plain._agrees_with(tokenizer):
            return plain
        log.info("the fast path for plain chats is disabled: its ids differ for this tokenizer")
        return None

    def _agrees_with(self, tokenizer: MistralTokenizer[Any, Any, Any, Any, Any]) -> bool:
        for turns in _CHECKS:
            messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
            try:
                request = ChatCompletionRequest.from_openai(messages)
                expected = tokenizer.encode_chat_completion(request).tokens
            except (MistralCommonException, ValueError):
                return False
            if self.pack(ChatRequest(messages)) != pack_u32(expected):
                return False
        return True

    def pack(self, chat: ChatRequest) -> bytes | None:
        """Returns the packed ids, or None when the chat is not plain; raises ValueError for invalid text."""
        if chat.tools or chat.template_kwargs or chat.chat_template or chat.documents or chat.continue_final_message:
            return None
        messages = chat.messages
        system = ""
        if messages[0]["role"] == "system":
            if not _is_text(messages[0]) or not messages[0]["content"]:
                return None
            system = messages[0]["content"] + _JOIN
            messages = messages[1:]
        if not _alternate(messages):
            return None
        texts = [
            message["content"].rstrip(" ") if index % 2 else message["content"]
            for index, message in enumerate(messages)
        ]
        texts[-1] = system + texts[-1]
        pieces = [self._bos]
        for index, ids in enumerate(self._pack(texts)):
            pieces += (ids, self._eos) if index % 2 else (self._begin, ids, self._end)
        return b"".join(pieces)


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content"), str)


def _alternate(messages: Iterable[Message]) -> bool:
    """Whether text-only user and assistant turns alternate, with the user first and last."""
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
