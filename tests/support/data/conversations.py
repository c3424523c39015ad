"""Random conversations that grow turn by turn, as chats do; equal for equal seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.support.data.tiny_models import CORPUS

SYSTEMS = ("", "Be brief.", "You are a helpful assistant.\n\nAnswer in German. Grüße 😀", "  spaces at both ends \n")
_PIECES = (
    *CORPUS,
    " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "é", "e\u0301", "ﬁ", "😀", "👨‍👩‍👧", "你好", "▁", "\u00a0", "\u3000",
    "\u200b", "\x00",
    "<|im_start|>", "<|im_end|>\n", "<|eot_id|>", "<|start_header_id|>user", "<s>", "</s>", "[INST]", "[/INST] ",
    "<tool>", "<|im_", "start|>", "<0x0A>", "<unk>", "grüße", "1234567890", "'ll've", "x" * 70, " " * 40,
    '{"a": [1, 2]}',
)  # fmt: skip


def conversations(seed: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """Chats with one to six turns, some of them beginning as an earlier one did.

    Yields:
        for each of `count` conversations, its messages; user and assistant take turns, the user first and last.
    """
    sampler = random.Random(seed)
    earlier: list[list[dict[str, Any]]] = []
    for _ in range(count):
        shared = sampler.choice(earlier) if earlier and sampler.random() < 0.2 else []
        messages = [*shared, {"role": "assistant", "content": _text(sampler) or "ok"}] if shared else _opening(sampler)
        for _ in range(sampler.randrange(6)):
            messages += [
                {"role": "user", "content": _text(sampler)},
                {"role": "assistant", "content": _text(sampler) or "ok"},
            ]
        messages.append({"role": "user", "content": _text(sampler)})
        if len(messages) < 20:
            earlier = [*earlier[-50:], messages]
        yield messages


def turns(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """What a client sends turn after turn until the conversation is `messages`."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            yield messages[: index + 1]


def _opening(sampler: random.Random) -> list[dict[str, Any]]:
    system = sampler.choice(SYSTEMS)
    return [{"role": "system", "content": system}] if system else []


def _text(sampler: random.Random) -> str:
    return "".join(sampler.choices(_PIECES, k=sampler.randrange(12)))
