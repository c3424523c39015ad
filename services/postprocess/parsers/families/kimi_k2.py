"""Parser of Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

The head, such as `functions.f:0`, is the id of the call.
"""

from __future__ import annotations

import re

from services.postprocess.parsers.calls.call_names import Named
from services.postprocess.parsers.calls.objects import HeadedBody
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.family import EngineNames, Family
from services.postprocess.parsers.scanning.markers import Markers

SEPARATOR, END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_HEAD = re.compile(rf"\s*((?:functions\.)?(\S+?)(?::\d+)?)\s*{re.escape(SEPARATOR)}\s*").fullmatch

_BARE = re.compile(r"\s*(functions\.(\S+?):\d+)\s*").fullmatch  # a call without arguments


class KimiBody(HeadedBody):
    """Body of one call."""

    edges = Markers("{", END)

    def named(self, head: str, edge: str) -> Named | None:
        found = _HEAD(head) or (_BARE(head) if edge == END else None)
        return Named(found[2], found[1]) if found is not None and SEPARATOR not in found[2] else None


class KimiParser(CallParser):
    """Parses calls of Kimi K2."""

    starts = ("<|tool_call_begin|>",)
    ends = (END,)
    swallowed = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    markers = frozenset((*starts, *ends, *swallowed, SEPARATOR))
    body = KimiBody


FAMILY = Family(
    name="kimi_k2",
    tool=KimiParser,
    hints=(SEPARATOR,),
    engine_reasoning=(EngineNames(vllm="kimi_k2", sglang="kimi_k2", mark="<|tool_calls_section_begin|>"),),
)
