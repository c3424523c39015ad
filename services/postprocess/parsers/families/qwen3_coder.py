"""Qwen3-Coder: arguments between tags, a line each."""

from __future__ import annotations

from services.postprocess.parsers.calls.tagged import Form, TaggedParser
from services.postprocess.parsers.families.family import Family


class Qwen3CoderParser(TaggedParser):
    """Parses `<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`; outer tags are optional."""

    starts = ("<function=",)
    ends = ("</function>",)
    swallowed = ("<tool_call>", "</tool_call>")
    markers = frozenset(swallowed)
    form = Form((">",), "<parameter=", ">", "", "</parameter>", "</function>", lines=True)


FAMILY = Family(
    name="qwen3_coder",
    tool=Qwen3CoderParser,
    aliases=("qwen3_xml", "step3p5", "nemotron_v3"),
    hints=("<parameter=",),
)
