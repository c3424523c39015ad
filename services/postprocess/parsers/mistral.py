"""Parser of Mistral.

The format is `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` up to tokenizer version 7, and later
`[TOOL_CALLS]name[ARGS]{…}` for each call, optionally with `[CALL_ID]id` after the name.
"""

from __future__ import annotations

import re

from services.postprocess.parsers.calls import Body, CallParser, Named
from services.postprocess.parsers.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.markers import Markers
from services.postprocess.parsers.objects import Arguments, CallArray, CallObject, is_name, read_head

_BRACE = Markers("{")
_HEAD = re.compile(r"\s*([^\s\[{]+?)\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]{1,64})\s*)?(?:\[ARGS\]\s*)?").fullmatch


class MistralBody(Body):
    """Body in either format."""

    def __init__(self) -> None:
        self._inner: Body | None = None
        self._head = ""

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        if self._inner is None:
            at = self._choose(text, at)
            if self._inner is None:
                return at, None
            if self._head:
                return at, self._named(at)
        at, found = self._inner.push(text, at)
        self.done, self.calling = self._inner.done, self._inner.calling
        return at, found

    def _choose(self, text: str, at: int) -> int:
        if not self._head:
            at = skip_spaces(text, at)
            if at < len(text) and text[at] in "[{":
                self._inner = CallArray() if text[at] == "[" else CallObject()
                return at
        at, self._head, edge = read_head(self._head, text, at, _BRACE)
        if edge:
            self._inner = Arguments()
        return at

    def _named(self, at: int) -> Named:
        found, self._head = _HEAD(self._head), ""
        if found is None or not is_name(found[1]):
            raise Malformed(at)
        self.calling = True
        return Named(found[1], found[2] or "")


class MistralParser(CallParser):
    """Parses calls of Mistral's models; ids have nine letters and digits, as their templates require."""

    starts = ("[TOOL_CALLS]",)
    markers = frozenset(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
    id_prefix = ""
    id_length = 9
    body = MistralBody
