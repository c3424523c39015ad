"""Hermes, Qwen 2.5 and 3: calls as JSON objects between tags."""

from __future__ import annotations

from services.postprocess.parsers.calls.objects import CallObject
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.family import Family


class HermesParser(CallParser):
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of Hermes, Qwen 2.5, Qwen 3 and QwQ."""

    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    markers = frozenset(starts + ends)
    body = CallObject


FAMILY = Family(name="hermes", tool=HermesParser, aliases=("qwen", "granite4"), hints=HermesParser.starts)
