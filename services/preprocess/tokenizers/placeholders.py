"""Keeps text that only looks like a media placeholder apart from the placeholders that chat templates write."""

from __future__ import annotations

import secrets
from dataclasses import replace
from threading import Lock
from typing import Any

import orjson
from tokenizers import Tokenizer

from services.common.packing import pack_u32
from services.preprocess.protocol import ChatRequest, ImageRule


class Placeholders:
    """The placeholder of one model.

    A chat with the placeholder in its text is rendered with a mark in its place; what the template then writes is the
    model's own. Such prompts are encoded by a second tokenizer, in which the token has another name.

    Args:
        content: the tokenizer.json.

    Raises:
        ValueError: the tokenizer does not have the token among its added ones.
    """

    def __init__(self, rule: ImageRule, content: bytes) -> None:
        self._content = orjson.loads(content)
        added = {entry["id"]: entry["content"] for entry in self._content.get("added_tokens") or []}
        if not added.get(rule.token_id):
            raise ValueError("the media placeholder is not an added token")
        nonce = secrets.token_hex(8)
        self._text: str = added[rule.token_id]
        self._typed, self._token = f"\ue000typed-{nonce}\ue001", f"\ue000media-{nonce}\ue001"
        self._token_id = rule.token_id
        self._lock = Lock()
        self._tokenizer: Tokenizer | None = None

    def _renamed(self, content: dict[str, Any]) -> Tokenizer:
        for entry in content.get("added_tokens") or []:
            if entry["id"] == self._token_id:
                entry["content"] = self._token
        vocabulary = (content.get("model") or {}).get("vocab")
        if isinstance(vocabulary, dict) and self._text in vocabulary:
            vocabulary[self._token] = vocabulary.pop(self._text)
        tokenizer = Tokenizer.from_str(orjson.dumps(content).decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if tokenizer.token_to_id(self._token) != self._token_id or tokenizer.token_to_id(self._text) is not None:
            raise ValueError("the media placeholder cannot be renamed")
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
        return text.replace(self._text, self._token).replace(self._typed, self._text)

    def shown(self, text: str) -> str:
        """Returns a rendered prompt with typed placeholders as text."""
        return text.replace(self._typed, self._text)

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
            return self._text in value
        if isinstance(value, dict):
            return any(self._text in key or self._contains(item) for key, item in value.items())
        return isinstance(value, list) and any(map(self._contains, value))

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(self._text, self._typed)
        if isinstance(value, dict):
            return {self._replaced(key): self._replaced(item) for key, item in value.items()}
        return [self._replaced(item) for item in value] if isinstance(value, list) else value
