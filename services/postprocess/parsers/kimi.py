"""Parser of Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

The head, such as `functions.f:0`, is the id of the call.
"""

from __future__ import annotations

import re

from services.postprocess.parsers.calls import Body, CallParser, Named
from services.postprocess.parsers.json_scan import Malformed
from services.postprocess.parsers.markers import Markers
from services.postprocess.parsers.objects import Arguments, is_name, read_head

SEPARATOR, END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_EDGES = Markers("{", END)
_HEAD = re.compile(rf"\s*((?:functions\.)?(\S+?)(?::\d+)?)\s*{re.escape(SEPARATOR)}\s*").fullmatch


class KimiBody(Body):
    """Body of one call."""

    def __init__(self) -> None:
        self._head = ""
        self._arguments: Arguments | None = None

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        if self._arguments is not None:
            at, arguments = self._arguments.push(text, at)
            self.done, self.calling = self._arguments.done, self._arguments.calling
            return at, arguments
        at, self._head, edge = read_head(self._head, text, at, _EDGES)
        if not edge:
            return at, None
        found = _HEAD(self._head)
        if found is None or not is_name(found[2]) or SEPARATOR in found[2]:
            raise Malformed(at)
        if edge == END:
            self.done = True
            return at, Named(found[2], found[1], "{}")
        self._arguments, self.calling = Arguments(), True
        return at, Named(found[2], found[1])


class KimiParser(CallParser):
    """Parses calls of Kimi K2."""

    starts = ("<|tool_call_begin|>",)
    ends = (END,)
    swallowed = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    markers = frozenset((*starts, *ends, *swallowed, SEPARATOR))
    body = KimiBody
