"""Hunyuan V3: the arguments of GLM after a separator."""

from __future__ import annotations

from collections.abc import Sequence

from services.postprocess.parsers.families.family import Call, Family, as_text
from services.postprocess.parsers.tag_families import TaggedParser
from services.postprocess.parsers.tagged import Form


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
    )


def _write(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in given.items()
        )
        written.append(f"<tool_call>{name}<tool_sep>\n{values}</tool_call>\n")
    return f"<tool_calls>\n{''.join(written)}</tool_calls>"


FAMILY = Family(
    name="hy_v3",
    markup="<tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>…</arg_value></tool_call>",
    tool=HunyuanParser,
    reasoning_name="think",
    hints=("<tool_sep>",),
    special=("<tool_sep>",),
    examples=(
        "<think>Hm</think>Look.\n<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Zürich 🌧️</arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n"
        "<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>",
        "<tool_call>f<tool_sep><arg_key>a</arg_key>oops</tool_call> more",
        "<tool_calls><tool_call>f<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>cut",
    ),
    fragments=(
        "<tool_calls>",
        "</tool_calls>",
        "<tool_call>f<tool_sep>",
        "</tool_call>",
        "<arg_key>city</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</arg",
        "<think>",
        "</think>",
    ),
    write=_write,
    untyped=True,
)
