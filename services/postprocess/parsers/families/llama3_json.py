"""Llama 3.1 to 3.3: calls as JSON objects, with or without a marker."""

from __future__ import annotations

from services.postprocess.parsers.calls.objects import CallObject
from services.postprocess.parsers.calls.parser import Body
from services.postprocess.parsers.calls.unmarked import UnmarkedCallParser
from services.postprocess.parsers.families.family import EngineNames, Family


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


FAMILY = Family(
    name="llama3_json",
    tool=LlamaJsonParser,
    rule=lambda template, special: "<|python_tag|>" in special and '"parameters"' in template,
    engine_tools=(EngineNames(sglang="llama3"),),
)
