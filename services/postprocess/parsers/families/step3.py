"""Step 3: invocations in XML within special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from services.postprocess.parsers.families.family import Call, Family, as_text
from services.postprocess.parsers.tag_families import TaggedParser
from services.postprocess.parsers.tagged import Form

_CALL, _CALL_END = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"


class Step3Parser(TaggedParser):
    """Parses `<steptml:invoke name="f"><steptml:parameter name="x">…</steptml:parameter></steptml:invoke>`."""

    starts = ('<steptml:invoke name="',)
    ends = ("</steptml:invoke>",)
    swallowed = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", _CALL, _CALL_END)
    markers = frozenset(
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", _CALL_END)
    )
    form = Form(('">',), '<steptml:parameter name="', '">', "", "</steptml:parameter>", "</steptml:invoke>")


def _write(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(
            f'<steptml:parameter name="{key}">{as_text(value)}</steptml:parameter>\n' for key, value in given.items()
        )
        written.append(f'{_CALL}<steptml:invoke name="{name}">\n{values}</steptml:invoke>{_CALL_END}\n')
    return f"<｜tool_calls_begin｜>\n{''.join(written)}<｜tool_calls_end｜>"


FAMILY = Family(
    name="step3",
    markup='<steptml:invoke name="NAME"><steptml:parameter name="KEY">…</steptml:parameter></steptml:invoke>',
    tool=Step3Parser,
    reasoning_name="think",
    hints=("steptml:invoke", "<｜tool_call_begin｜>"),
    examples=(
        "<think>Hm</think>Look.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Zürich 🌧️</steptml:parameter>\n'
        '<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
        '<steptml:invoke name="f"><steptml:parameter nam="a">1</steptml:parameter></steptml:invoke> more',
        "<｜tool_calls_begin｜><｜tool_call_begin｜>no call",
    ),
    fragments=(
        *Step3Parser.swallowed,
        '<steptml:invoke name="f">',
        "</steptml:invoke>",
        '<steptml:parameter name="city">',
        "</steptml:parameter>",
        "<｜tool_call_",
        "<think>",
        "</think>",
    ),
    write=_write,
    untyped=True,
)
