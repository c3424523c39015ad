"""Cohere Command A, R and R+: actions as a JSON array, thoughts and responses between special tokens."""

from __future__ import annotations

from functools import partial

from services.postprocess.parsers.calls.objects import CallArray, Names
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.reasoning.think import ThinkParser

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


FAMILY = Family(
    name="cohere_command3",
    tool=CohereParser,
    reasoning=CohereThinkParser,
    aliases=("cohere_command4", "cohere"),
    hints=("<|START_ACTION|>",),
    special=("<|START_ACTION|>",),
    reasoning_hints=("<|START_THINKING|>",),
)
