"""Cohere Command A, R and R+: actions as a JSON array, thoughts and responses between special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from services.postprocess.parsers.calls import CallParser
from services.postprocess.parsers.families.family import Call, Family
from services.postprocess.parsers.objects import CallArray, Names
from services.postprocess.parsers.think import ThinkParser

_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class CohereParser(CallParser):
    """Parses `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`."""

    starts = ("<|START_ACTION|>",)
    ends = ("<|END_ACTION|>",)
    dropped = _RESPONSE
    markers = frozenset((*starts, *ends, *_RESPONSE))
    body = partial(CallArray, names=Names("tool_name", "tool_call_id"))


class CohereThinkParser(ThinkParser):
    """Parses `<|START_THINKING|>…<|END_THINKING|>`."""

    start = "<|START_THINKING|>"
    end = "<|END_THINKING|>"


def _write(calls: Sequence[Call]) -> str:
    written = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": given}
        for index, (name, given) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(written, ensure_ascii=False)}<|END_ACTION|>"


FAMILY = Family(
    name="cohere_command3",
    markup='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>',
    tool=CohereParser,
    reasoning=CohereThinkParser,
    aliases=("cohere_command4", "cohere"),
    hints=("<|START_ACTION|>",),
    special=("<|START_ACTION|>",),
    reasoning_hints=("<|START_THINKING|>",),
    examples=(
        "<|START_THINKING|>Hm 🤔<|END_THINKING|>"
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather",  '
        '"parameters": {"city": "Zürich 🌧️", "days": [1, 2.5]}},\n    {"tool_call_id": "1", "tool_name": "f", '
        '"parameters": {}}\n]<|END_ACTION|>',
        "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": oops}}]<|END_ACTION|> more',
        "<|START_ACTION|>nothing<|END_ACTION|> more",
    ),
    fragments=(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '[{"tool_call_id": "0", "tool_name": "f", "parameters": {',
        '"a": 1',
        "}}]",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_",
    ),
    write=_write,
)
