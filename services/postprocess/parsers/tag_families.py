"""Parsers of families that write arguments between tags: Qwen3-Coder, GLM 4.5 and later, MiniMax M2."""

from __future__ import annotations

from typing import ClassVar

from services.postprocess.parsers.argument_types import ArgumentTypes
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls import Body, CallParser
from services.postprocess.parsers.tagged import Form, Surroundings, TaggedBody


class TaggedParser(CallParser):
    """Parses calls in a tagged format."""

    form: ClassVar[Form]

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._types = ArgumentTypes(context.tools)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._around = Surroundings(cls.starts, cls.swallowed)

    _around: ClassVar[Surroundings]

    def body(self) -> Body:
        return TaggedBody(self.form, self._types, self._around)


class Qwen3CoderParser(TaggedParser):
    """Parses `<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`; outer tags are optional."""

    starts = ("<function=",)
    ends = ("</function>",)
    swallowed = ("<tool_call>", "</tool_call>")
    markers = frozenset(swallowed)
    form = Form((">",), "<parameter=", ">", "", "</parameter>", "</function>", lines=True)


class GlmParser(TaggedParser):
    """Parses `<tool_call>f<arg_key>x</arg_key><arg_value>…</arg_value></tool_call>`."""

    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    markers = frozenset((*starts, *ends, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
    form = Form(("\n", "<"), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")


class MiniMaxParser(TaggedParser):
    """Parses `<minimax:tool_call><invoke name="f"><parameter name="x">…</parameter></invoke></minimax:tool_call>`."""

    starts = ('<invoke name="',)
    ends = ("</invoke>",)
    swallowed = ("<minimax:tool_call>", "</minimax:tool_call>")
    markers = frozenset(swallowed)
    form = Form(('">',), '<parameter name="', '">', "", "</parameter>", "</invoke>")
