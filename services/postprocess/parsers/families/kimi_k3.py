"""Kimi K3: channels and calls as elements of special tokens, whose attributes tell which values are strings."""

from __future__ import annotations

import re
from dataclasses import replace

from services.postprocess.parsers.base import Chain, ParserContext
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.calls.tagged import Form, Key, TaggedParser
from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.reasoning.think import ThinkParser

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_SPECIAL = frozenset((_OPEN, _CLOSE, _SEP))
_RESPONSE = (f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}", f"{_CLOSE}message{_SEP}")
_NAME = re.compile(r'([^"]*)"(?:\s+index="\d+")?\s*').fullmatch
_KEY = re.compile(r'([^"]*)"(?:\s+type="(string|number|integer|boolean|null|object|array)")?\s*').fullmatch


def _name(text: str) -> str:
    found = _NAME(text)
    return _unescaped(found[1]) if found else ""


def _key(text: str) -> Key | None:
    found = _KEY(text)
    return Key(_unescaped(found[1]), found[2] == "string" if found[2] else None) if found else None


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


class KimiK3Parser(TaggedParser):
    """Parses `<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>…`.

    The arguments may also be a JSON object, as the template writes those of earlier calls that are text.
    """

    starts = (f'{_OPEN}call tool="',)
    ends = (f"{_CLOSE}call{_SEP}",)
    swallowed = (f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}")
    dropped = _RESPONSE
    markers = _SPECIAL
    form = Form(
        (_SEP,),
        f'{_OPEN}argument key="',
        _SEP,
        "",
        f"{_CLOSE}argument{_SEP}",
        f"{_CLOSE}call{_SEP}",
        special=True,
        objects=True,
        read_name=_name,
        read_key=_key,
    )


class _ThinkParser(ThinkParser):
    start = f"{_OPEN}think{_SEP}"
    end = f"{_CLOSE}think{_SEP}"


class _ResponseParser(CallParser):
    """Omits the tags of the response."""

    dropped = _RESPONSE


class KimiK3ThinkParser(Chain):
    """Parses `<|open|>think<|sep|>…<|close|>think<|sep|>`, and omits the tags of the response after it."""

    markers = _SPECIAL

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_ThinkParser(context), _ResponseParser(replace(context, required=False, only="")))
        self.context = context


FAMILY = Family(
    name="kimi_k3",
    tool=KimiK3Parser,
    reasoning=KimiK3ThinkParser,
    hints=(f"{_OPEN}call",),
    reasoning_hints=(f"{_OPEN}think{_SEP}",),
)
