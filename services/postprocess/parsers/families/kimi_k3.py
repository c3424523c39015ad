"""Kimi K3: channels and calls as elements of special tokens, whose attributes tell which values are strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from services.postprocess.parsers.base import Chain, ParserContext
from services.postprocess.parsers.calls import CallParser
from services.postprocess.parsers.families.family import Call, Family, as_text
from services.postprocess.parsers.tag_families import TaggedParser
from services.postprocess.parsers.tagged import Form, Key
from services.postprocess.parsers.think import ThinkParser

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
    """Parses `<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>…`."""

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


def _write(calls: Sequence[Call]) -> str:
    written = []
    for number, (name, given) in enumerate(calls, 1):
        values = "".join(
            f'{_OPEN}argument key="{key}" type="{"string" if isinstance(value, str) else "object"}"{_SEP}'
            f"{as_text(value)}{_CLOSE}argument{_SEP}"
            for key, value in given.items()
        )
        written.append(f'{_OPEN}call tool="{name}" index="{number}"{_SEP}{values}{_CLOSE}call{_SEP}')
    return f"{_OPEN}tools{_SEP}{''.join(written)}{_CLOSE}tools{_SEP}"


FAMILY = Family(
    name="kimi_k3",
    markup='<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY" type="string"<|sep|>…',
    tool=KimiK3Parser,
    reasoning=KimiK3ThinkParser,
    hints=(f"{_OPEN}call",),
    reasoning_hints=(f"{_OPEN}think{_SEP}",),
    examples=(
        "<|open|>think<|sep|>Hm 🤔<|close|>think<|sep|><|open|>response<|sep|>Look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>Zürich "🌧️"\n\nx<|close|>argument<|sep|><|open|>argument key="days" type="array"<|sep|>'
        '[1, 2.5e3]<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="f" index="2"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "<|open|>response<|sep|>It rains.<|close|>response<|sep|>",
        '<|open|>call tool="f"<|sep|><|open|>argument key="city"<|sep|>7<|close|>argument<|sep|>'
        "<|close|>call<|sep|> more",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>cut',
    ),
    fragments=(
        *KimiK3Parser.swallowed,
        *_RESPONSE,
        '<|open|>call tool="f" index="1"<|sep|>',
        "<|close|>call<|sep|>",
        '<|open|>argument key="city" type="string"<|sep|>',
        '<|open|>argument key="days" type="integer"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|close|>",
        "<|sep|>",
    ),
    write=_write,
)
