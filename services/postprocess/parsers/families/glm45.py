"""GLM 4.5 and later: keys and values of arguments between tags."""

from __future__ import annotations

from services.postprocess.parsers.calls.tagged import Form, TaggedParser
from services.postprocess.parsers.families.family import EngineNames, Family


class GlmParser(TaggedParser):
    """Parses `<tool_call>f<arg_key>x</arg_key><arg_value>…</arg_value></tool_call>`."""

    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    markers = frozenset((*starts, *ends, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
    form = Form(("\n", "<"), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", special=True)


FAMILY = Family(
    name="glm45",
    tool=GlmParser,
    aliases=("glm47",),
    hints=("<arg_key>",),
    engine_reasoning=(EngineNames(vllm="glm45", sglang="glm45", mark="<arg_key>"),),
)
