"""Families that write calls as a JSON array within a marker: Phi-4 mini, Jamba, Nemotron, Hunyuan A13B."""

from __future__ import annotations

from functools import partial

from services.postprocess.parsers.calls import CallParser
from services.postprocess.parsers.families.family import Family, objects
from services.postprocess.parsers.objects import CallArray

_EXAMPLE = (
    '{"name": "get_weather", "arguments": {"city": "Zürich 🌧️\\n\\"x\\" {}", "days": [1, 2.5e3, true, null]}}, '
    '{"name": "f", "arguments": {}}'
)
_FRAGMENTS = ('[{"name": "g", "arguments": {}}', "]", '"name": "f"')


class PhiParser(CallParser):
    """Parses `functools[{"name": …, "arguments": {…}}]`."""

    starts = ("functools[",)
    body = partial(CallArray, opened=True)


class JambaParser(CallParser):
    """Parses `<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>`."""

    starts = ("<tool_calls>",)
    ends = ("</tool_calls>",)
    markers = frozenset(starts + ends)
    body = CallArray


class NemotronArrayParser(CallParser):
    """Parses `<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>`."""

    starts = ("<TOOLCALL>",)
    ends = ("</TOOLCALL>",)
    markers = frozenset(starts + ends)
    body = CallArray


PHI = Family(
    name="phi4_mini_json",
    markup='functools[{"name": …, "arguments": {…}}]',
    tool=PhiParser,
    aliases=("phi4",),
    hints=("functools[",),
    examples=(
        f"Look. functools[{_EXAMPLE}]",
        'functools[{"name": "f", "arguments": {"a": oops}}] more',
        "the module functools, and functools[0]",
        'functools[{"name": "f", "arguments": {"a": "cut',
    ),
    fragments=("functools[", "functools", *_FRAGMENTS),
    write=lambda calls: f"functools{objects(calls)}",
)
JAMBA = Family(
    name="jamba",
    markup='<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>',
    tool=JambaParser,
    aliases=("hunyuan_a13b", "hunyuan"),
    reasoning_name="think",
    hints=("<tool_calls>",),
    examples=(
        f"<think>Hm</think>Look.\n<tool_calls>[{_EXAMPLE}]</tool_calls>",
        '<tool_calls>[\n {"name": "f", "arguments": {"city": "x"}}\n]</tool_calls> done',
        "<tool_calls>nothing</tool_calls> more",
        '<tool_calls>[{"name": "f", "arguments": {"a": "cut',
    ),
    fragments=("<tool_calls>", "</tool_calls>", "<tool_", "<think>", "</think>", *_FRAGMENTS),
    write=lambda calls: f"<tool_calls>{objects(calls)}</tool_calls>",
)
NEMOTRON = Family(
    name="nemotron_deci",
    markup='<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>',
    tool=NemotronArrayParser,
    aliases=("nemotron_json",),
    reasoning_name="think",
    hints=("<TOOLCALL>",),
    examples=(
        f"<think>Hm</think>Look.\n<TOOLCALL>[{_EXAMPLE}]</TOOLCALL>",
        '<TOOLCALL>[{"name": "f", "arguments": {"city": "x"}}]</TOOLCALL> done',
        "<TOOLCALL>nothing</TOOLCALL> more",
        '<TOOLCALL>[{"name": "f", "arguments": {"a": "cut',
    ),
    fragments=("<TOOLCALL>", "</TOOLCALL>", "<TOOL", "<think>", "</think>", *_FRAGMENTS),
    write=lambda calls: f"<TOOLCALL>{objects(calls)}</TOOLCALL>",
)
