"""Parsers of calls that are JSON objects with the name and the arguments."""

from __future__ import annotations

from services.postprocess.parsers.calls import Body, CallParser
from services.postprocess.parsers.objects import CallArray, CallObject
from services.postprocess.parsers.unmarked import UnmarkedCallParser


class HermesParser(CallParser):
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of Hermes, Qwen 2.5, Qwen 3 and QwQ."""

    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    markers = frozenset(starts + ends)
    body = CallObject


class GraniteParser(CallParser):
    """Parses `<|tool_call|>[{"name": …, "arguments": {…}}, …]` of Granite 3; Granite 4 uses the format of Hermes."""

    starts = ("<|tool_call|>",)
    markers = frozenset(starts)
    body = CallArray


class LlamaJsonParser(UnmarkedCallParser):
    """Parses `{"name": …, "parameters": {…}}` of Llama 3.1 to 3.3, separated by semicolons.

    `<|python_tag|>` may precede them. JSON output that names none of the tools is content.
    """

    starts = ("<|python_tag|>",)
    markers = frozenset(starts)
    opening = "{"
    body = CallObject

    def bare_body(self) -> Body:
        return CallObject(self.known, bare=True)
