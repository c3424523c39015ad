"""Parser of Mistral.

The format is `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` up to tokenizer version 7, and later
`[TOOL_CALLS]name[ARGS]{…}` for each call, optionally with `[CALL_ID]id` after the name.
"""

from __future__ import annotations

import re

from services.postprocess.parsers.calls import CallParser, Named
from services.postprocess.parsers.json_scan import skip_spaces
from services.postprocess.parsers.markers import Markers
from services.postprocess.parsers.objects import CallArray, CallObject, HeadedBody

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
