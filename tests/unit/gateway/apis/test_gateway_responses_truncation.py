"""The search of `truncation: auto` translates and tokenizes no conversation twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.apis.responses.truncation import truncated_to_fit
from services.gateway.core.request import TextPrompt


class Turns:
    """A conversation of so many turns."""

    def __init__(self, number: int) -> None:
        self.number = number

    def turn_starts(self) -> list[int]:
        return list(range(self.number))

    def without_oldest(self, turns: int) -> Turns:
        return Turns(self.number - turns)


@pytest.mark.parametrize(
    ("turns", "fitting", "translated", "tokenized"),
    [
        (1, 1, [], []),
        (1, 0, [], []),
        (6, 6, [], [6]),
        (6, 5, [4, 5], [6, 4, 5]),
        (6, 3, [4, 3], [6, 4, 3]),
        (6, 0, [4, 3, 2, 1], [6, 4, 3, 2]),
        (2, 1, [1], [2]),
    ],
)
async def test_truncation_translates_and_tokenizes_each_length_at_most_once(
    turns: int, fitting: int, translated: list[int], tokenized: list[int]
) -> None:
    translations: list[int] = []
    tokenizations: list[int] = []

    def request(number: int) -> Any:
        return SimpleNamespace(generation=SimpleNamespace(model="m", prompt=TextPrompt(str(number))), turns=number)

    async def translate(chat: Any) -> Any:
        translations.append(chat.number)
        return request(chat.number)

    async def tokenize(model: str, prompt: TextPrompt) -> Any:
        tokenizations.append(int(prompt.text))
        return SimpleNamespace(context_limit=lambda limit: limit, length=int(prompt.text))

    entry = SimpleNamespace(model="m", context_length=fitting + 1)
    pipelines: Any = SimpleNamespace(
        registry=SimpleNamespace(model=lambda name: entry), preprocess=SimpleNamespace(tokenize=tokenize)
    )
    chat: Any = Turns(turns)
    found: Any = await truncated_to_fit(pipelines, chat, request(turns), 1, translate)
    assert found.turns == max(1, min(turns, fitting))
    assert (translations, tokenizations) == (translated, tokenized)
