"""Parser of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one pair of tags for each call."""

from __future__ import annotations

from services.postprocess.parsers.calls import Body, CallParser
from services.postprocess.parsers.objects import CallObject


class HermesParser(CallParser):
    """Parses calls of Hermes, Qwen 2.5, Qwen 3 and QwQ."""

    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    markers = frozenset(starts + ends)

    def body(self) -> Body:
        """See CallParser."""
        return CallObject()
