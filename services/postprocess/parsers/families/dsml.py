"""DSML of DeepSeek V3.2, V4 and V4.1: tags that tell which values are strings."""

from __future__ import annotations

from collections.abc import Sequence

from services.postprocess.parsers.families.family import Call, Family, as_text
from services.postprocess.parsers.tag_families import TaggedParser
from services.postprocess.parsers.tagged import Form, Key

_OPEN, _CLOSE = "<｜DSML｜", "</｜DSML｜"
_STRING = '" string="'


def _key(text: str) -> Key | None:
    name, found, is_text = text.partition(_STRING)
    if is_text not in ("", "true", "false"):
        return None
    return Key(name, is_text == "true" if found else None)


class DsmlParser(TaggedParser):
    """Parses `<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">…</｜DSML｜parameter>`."""

    starts = (f'{_OPEN}invoke name="',)
    ends = (f"{_CLOSE}invoke>",)
    swallowed = (
        f"{_OPEN}function_calls>",
        f"{_CLOSE}function_calls>",
        f"{_OPEN}tool_calls>",
        f"{_CLOSE}tool_calls>",
    )
    markers = frozenset((*swallowed, "｜DSML｜"))
    form = Form(('">',), f'{_OPEN}parameter name="', '">', "", f"{_CLOSE}parameter>", f"{_CLOSE}invoke>", read_key=_key)


def _write(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(
            f'{_OPEN}parameter name="{key}{_STRING}{str(isinstance(value, str)).lower()}">{as_text(value)}'
            f"{_CLOSE}parameter>\n"
            for key, value in given.items()
        )
        written.append(f'{_OPEN}invoke name="{name}">\n{values}{_CLOSE}invoke>\n')
    return f"{_OPEN}function_calls>\n{''.join(written)}{_CLOSE}function_calls>"


FAMILY = Family(
    name="deepseek_v32",
    markup='<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">…</｜DSML｜parameter>',
    tool=DsmlParser,
    aliases=("deepseek_v4", "deepseek_v41", "deepseekv32", "deepseekv4"),
    reasoning_name="think",
    hints=("｜DSML｜",),
    special=("｜DSML｜",),
    examples=(
        '<think>\nHm 🤔\n</think>Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Zürich "🌧️"\n\nx</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2.5e3]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="false">null'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="city">7</｜DSML｜parameter></｜DSML｜invoke> more',
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="city" string="true">cut',
    ),
    fragments=(
        *DsmlParser.swallowed,
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="city" string="true">',
        '<｜DSML｜parameter name="days" string="false">',
        "</｜DSML｜parameter>",
        "</｜DSML｜par",
        "<think>",
        "</think>",
    ),
    write=_write,
)
