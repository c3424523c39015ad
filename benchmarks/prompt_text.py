"""Text for prompts that no cache has seen: slices of the Python library's own sources, English and code."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import orjson

from sluice.v1 import preprocess_pb2

BLOCK_SIZE = 16


class Text:
    """Slices of a large text, each from a place of its own; equal for equal seeds."""

    def __init__(self, seed: int) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        self._text = "\n".join(path.read_text("utf-8", "replace") for path in sorted(library.glob("*.py")))
        self._chooser = random.Random(seed)
        self.chars_a_token = 4.0

    def of_tokens(self, tokens: int) -> str:
        """About as many tokens of text."""
        size = int(tokens * self.chars_a_token)
        text = ""
        while len(text) < size:
            start = self._chooser.randrange(len(self._text))
            text += self._text[start : start + size - len(text)]
        return text


def user(content: str) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": content}


def chat(model: str, messages: list[dict[str, Any]]) -> preprocess_pb2.TokenizeRequest:
    """What the gateway sends for a chat."""
    return preprocess_pb2.TokenizeRequest(
        model=model, chat=preprocess_pb2.ChatInput(messages_json=orjson.dumps(messages)), block_size=BLOCK_SIZE
    )


def growing_chat(text: Text, turns: int, tokens: int) -> list[list[dict[str, Any]]]:
    """A conversation's requests, turn after turn; the last one has about as many tokens."""
    part = tokens // (2 * turns)
    messages: list[dict[str, Any]] = [{"role": "system", "content": text.of_tokens(part)}]
    requests = []
    for _ in range(turns):
        messages.append(user(text.of_tokens(part)))
        requests.append(list(messages))
        messages.append({"role": "assistant", "content": text.of_tokens(part)})
    return requests
