"""MiniMax M2: invocations in XML."""

from __future__ import annotations

from services.postprocess.parsers.calls.tagged import Form, TaggedParser
from services.postprocess.parsers.families.family import EngineNames, Family


class MiniMaxParser(TaggedParser):
    """Parses `<minimax:tool_call><invoke name="f"><parameter name="x">…</parameter></invoke></minimax:tool_call>`."""

    starts = ('<invoke name="',)
    ends = ("</invoke>",)
    swallowed = ("<minimax:tool_call>", "</minimax:tool_call>")
    markers = frozenset(swallowed)
    form = Form(('">',), '<parameter name="', '">', "", "</parameter>", "</invoke>")


FAMILY = Family(
    name="minimax_m2",
    tool=MiniMaxParser,
    hints=("<minimax:tool_call>",),
    engine_tools=(EngineNames(sglang="minimax-m2"),),
    engine_reasoning=(EngineNames(vllm="minimax_m2", sglang="minimax", mark="<minimax:tool_call>"),),
)
