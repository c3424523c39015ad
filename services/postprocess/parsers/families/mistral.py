"""Parser of Mistral.

The format is `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` up to tokenizer version 7, and later
`[TOOL_CALLS]name[ARGS]{…}` for each call, optionally with `[CALL_ID]id` after the name.
"""

from __future__ import annotations

import re

from services.postprocess.parsers.calls.call_names import Named
from services.postprocess.parsers.calls.objects import CallArray, CallObject, HeadedBody
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.reasoning.think import ThinkParser
from services.postprocess.parsers.scanning.json_scan import skip_spaces
from services.postprocess.parsers.scanning.markers import Markers

_HEAD = re.compile(r"\s*([^\s\[{]+?)\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]{1,64})\s*)?(?:\[ARGS\]\s*)?").fullmatch


class MistralBody(HeadedBody):
    """Body in either format."""

    edges = Markers("{")

    def named(self, head: str, edge: str) -> Named | None:
        found = _HEAD(head)
        return Named(found[1], found[2] or "") if found is not None else None

    def read_head(self, text: str, at: int) -> tuple[int, Named | str | None]:
        if not self._head:
            at = skip_spaces(text, at)
            if at < len(text) and text[at] in "[{":
                self._inner = CallArray() if text[at] == "[" else CallObject()
                return self.push(text, at)
        return super().read_head(text, at)


class MistralParser(CallParser):
    """Parses calls of Mistral's models; ids have nine letters and digits, as their templates require."""

    starts = ("[TOOL_CALLS]",)
    markers = frozenset(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
    id_prefix = ""
    id_length = 9
    body = MistralBody


class MistralThinkParser(ThinkParser):
    """Parses Magistral's `[THINK]…[/THINK]`."""

    start = "[THINK]"
    end = "[/THINK]"


FAMILY = Family(name="mistral", tool=MistralParser, hints=MistralParser.starts, special=MistralParser.starts)
REASONING = Family(
    name="mistral",
    reasoning=MistralThinkParser,
    reasoning_hints=(MistralThinkParser.start,),
    reasoning_special=(MistralThinkParser.start,),
)
"""Apart from the calls, because `auto` looks for it earlier."""
