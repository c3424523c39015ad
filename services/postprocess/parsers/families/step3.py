"""Step 3: invocations in XML within special tokens."""

from __future__ import annotations

from services.postprocess.parsers.calls.tagged import Form, TaggedParser
from services.postprocess.parsers.families.family import Family

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


FAMILY = Family(
    name="step3",
    tool=Step3Parser,
    hints=("steptml:invoke", "<｜tool_call_begin｜>"),
)
