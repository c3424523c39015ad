"""Hunyuan V3: the arguments of GLM after a separator."""

from __future__ import annotations

from services.postprocess.parsers.calls.tagged import Form, TaggedParser
from services.postprocess.parsers.families.family import Family


class HunyuanParser(TaggedParser):
    """Parses `<tool_call>f<tool_sep><arg_key>x</arg_key><arg_value>…</arg_value></tool_call>`."""

    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    swallowed = ("<tool_calls>", "</tool_calls>")
    markers = frozenset(
        (*starts, *ends, *swallowed, "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    )
    form = Form(
        ("<tool_sep>", "<arg_key>", "</tool_call>"),
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</tool_call>",
        special=True,
    )


FAMILY = Family(
    name="hy_v3",
    tool=HunyuanParser,
    hints=("<tool_sep>",),
    special=("<tool_sep>",),
)
