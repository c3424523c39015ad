"""Granite 3: calls as a JSON array after a marker."""

from __future__ import annotations

from services.postprocess.parsers.calls.objects import CallArray
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.family import Family


class GraniteParser(CallParser):
    """Parses `<|tool_call|>[{"name": …, "arguments": {…}}, …]` of Granite 3, which 3.1 begins with `<tool_call>`.

    Granite 4 uses the format of Hermes.
    """

    starts = ("<|tool_call|>", "<tool_call>")
    markers = frozenset(starts)
    body = CallArray


FAMILY = Family(name="granite", tool=GraniteParser, hints=("<|tool_call|>",))
