"""DSML of DeepSeek V3.2, V4 and V4.1: tags that tell which values are strings."""

from __future__ import annotations

from typing import ClassVar

from services.postprocess.parsers.calls.tagged import Form, Key, TaggedParser
from services.postprocess.parsers.families.family import Family

_OPEN, _CLOSE = "<｜DSML｜", "</｜DSML｜"
_SPACED_OPEN, _SPACED_CLOSE = f"{_OPEN} ", f"{_CLOSE} "
_WRAPPERS = ("function_calls>", "tool_calls>")
_STRING = '" string="'


def _key(text: str) -> Key | None:
    name, found, is_text = text.partition(_STRING)
    if is_text not in ("", "true", "false"):
        return None
    return Key(name, is_text == "true" if found else None)


def _form(opening: str, closing: str) -> Form:
    return Form(
        ('">',),
        f'{opening}parameter name="',
        '">',
        "",
        f"{closing}parameter>",
        f"{closing}invoke>",
        special=True,
        wrapper="arguments",
        read_key=_key,
    )


class DsmlParser(TaggedParser):
    """Parses `<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">…</｜DSML｜parameter>`.

    V4.1 writes a space after the special token, and `calls` for `tool_calls`.
    """

    starts = (f'{_OPEN}invoke name="', f'{_SPACED_OPEN}invoke name="')
    ends = (f"{_CLOSE}invoke>", f"{_SPACED_CLOSE}invoke>")
    swallowed = tuple(
        lead + name
        for name, opening, closing in (
            *((name, _OPEN, _CLOSE) for name in _WRAPPERS),
            *((name, _SPACED_OPEN, _SPACED_CLOSE) for name in (*_WRAPPERS, "calls>")),
        )
        for lead in (opening, closing)
    )
    markers = frozenset((*swallowed, "｜DSML｜"))
    form = _form(_OPEN, _CLOSE)
    more_forms: ClassVar[dict[str, Form]] = {starts[1]: _form(_SPACED_OPEN, _SPACED_CLOSE)}


FAMILY = Family(
    name="deepseek_v32",
    tool=DsmlParser,
    aliases=("deepseek_v4", "deepseek_v41", "deepseekv32", "deepseekv4"),
    hints=("｜DSML｜",),
    special=("｜DSML｜",),
)
