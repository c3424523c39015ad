"""Families that write calls as a JSON array within a marker: Phi-4 mini, Jamba, Nemotron."""

from __future__ import annotations

from functools import partial

from services.postprocess.parsers.calls.objects import CallArray
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.family import Family


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
    tool=PhiParser,
    aliases=("phi4",),
    hints=("functools[",),
)
JAMBA = Family(
    name="jamba",
    tool=JambaParser,
    hints=("<tool_calls>",),
)
NEMOTRON = Family(
    name="nemotron_deci",
    tool=NemotronArrayParser,
    aliases=("nemotron_json",),
    hints=("<TOOLCALL>",),
)
