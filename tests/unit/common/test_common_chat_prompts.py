"""The prompt of a chat: every field that decides it is one of those by which its absence is recognized."""

from __future__ import annotations

from collections import UserDict
from typing import Any

from services.common.apis import prompts
from services.common.apis.prompts import chat_prompt


class Noting(UserDict[str, Any]):
    """A body that notes which of its fields are read."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field."""
        self.read.add(key)
        return super().get(key, default)


def test_fields_that_decide_a_prompt_are_those_whose_absence_is_looked_for() -> None:
    body = Noting(reasoning_effort="low")
    chat_prompt(body, [], ())
    assert body.read == prompts._OPTIONS


def test_prompt_of_a_chat_without_options_is_that_of_a_chat_with_neutral_ones() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert chat_prompt({}, messages, ()) == chat_prompt({"tools": None}, messages, ())
