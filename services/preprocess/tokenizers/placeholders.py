"""Keeps text that only looks like a media placeholder apart from the placeholders that chat templates write."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import orjson
from tokenizers import Tokenizer

from services.common.base.packing import pack_u32
from services.preprocess.contract.tokenizer import ChatRequest


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """A placeholder of one kind of media items.

    Attributes:
        text: of the token in the model's tokenizer.
        typed: stands for the text in a chat that contains it.
        token: text of the token in the second tokenizer.
    """

    token_id: int
    text: str
    typed: str
    token: str


class Placeholders:
    """The placeholders of one model.

    A chat with a placeholder in its text is rendered with a mark in its place; what the template then writes is the
    model's own. Such prompts are encoded by a second tokenizer, in which the tokens have other names.

    Args:
        token_ids: the placeholders.
        content: the tokenizer.json.

    Raises:
        ValueError: the tokenizer does not have a placeholder among its added tokens.
    """

    def __init__(self, token_ids: Collection[int], content: bytes) -> None:
        self._content = orjson.loads(content)
        added = {entry["id"]: entry["content"] for entry in self._content.get("added_tokens") or []}
        if not all(map(added.get, token_ids)):
            raise ValueError("a media placeholder is not an added token")
        nonce = secrets.token_hex(8)
        self._all = [
            _Placeholder(each, added[each], f"\ue000typed-{each}-{nonce}\ue001", f"\ue000media-{each}-{nonce}\ue001")
            for each in token_ids
        ]
        self._lock = Lock()
        self._tokenizer: Tokenizer | None = None

    def _renamed(self, content: dict[str, Any]) -> Tokenizer:
        names = {each.token_id: each.token for each in self._all}
        for entry in content.get("added_tokens") or []:
            entry["content"] = names.get(entry["id"], entry["content"])
        vocabulary = (content.get("model") or {}).get("vocab")
        for each in self._all:
            if isinstance(vocabulary, dict) and each.text in vocabulary:
                vocabulary[each.token] = vocabulary.pop(each.text)
        tokenizer = Tokenizer.from_str(orjson.dumps(content).decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for each in self._all:
            if tokenizer.token_to_id(each.token) != each.token_id or tokenizer.token_to_id(each.text) is not None:
                raise ValueError("a media placeholder cannot be renamed")
        return tokenizer

    def hidden(self, chat: ChatRequest) -> ChatRequest:
        """Returns the chat with marks for placeholders in its text; the same object if there are none."""
        if not any(map(self._contains, (chat.messages, chat.tools, chat.documents, chat.template_kwargs))):
            return chat
        return replace(
            chat,
            messages=self._replaced(chat.messages),
            tools=self._replaced(chat.tools),
            documents=self._replaced(chat.documents),
            template_kwargs=self._replaced(chat.template_kwargs),
        )

    def restored(self, text: str) -> str:
        """Returns a prompt of a chat from `hidden`: typed placeholders as text, those of the template renamed."""
        for each in self._all:
            text = text.replace(each.text, each.token)
        return self.shown(text)

    def shown(self, text: str) -> str:
        """Returns a rendered prompt with typed placeholders as text."""
        for each in self._all:
            text = text.replace(each.typed, each.text)
        return text

    def packed(self, text: str) -> bytes:
        """Returns packed ids of a prompt from `restored`; raises TypeError or ValueError for invalid Unicode.

        Also ValueError if the tokenizer gives the token another id under its other name.
        """
        with self._lock:  # built for the first such prompt: it takes as much memory as the model's own
            if self._tokenizer is None:
                self._tokenizer = self._renamed(self._content)
                self._content = {}
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return pack_u32(encoding.ids)

    def _contains(self, value: Any) -> bool:
        if isinstance(value, str):
            return any(each.text in value for each in self._all)
        if isinstance(value, dict):
            return any(self._contains(key) or self._contains(item) for key, item in value.items())
        return isinstance(value, list) and any(map(self._contains, value))

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            for each in self._all:
                value = value.replace(each.text, each.typed)
            return value
        if isinstance(value, dict):
            return {self._replaced(key): self._replaced(item) for key, item in value.items()}
        return [self._replaced(item) for item in value] if isinstance(value, list) else value
