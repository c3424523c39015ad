"""Seed-OSS: the calls of Qwen3-Coder within tags of its own."""

from __future__ import annotations

from collections.abc import Sequence

from services.postprocess.parsers.families.family import Call, Family, as_text
from services.postprocess.parsers.tag_families import Qwen3CoderParser
from services.postprocess.parsers.think import ThinkParser


class SeedOssParser(Qwen3CoderParser):
    """Parses `<seed:tool_call><function=f><parameter=x>…</parameter></function></seed:tool_call>`."""

    swallowed = ("<seed:tool_call>", "</seed:tool_call>")
    markers = frozenset(swallowed)


class SeedThinkParser(ThinkParser):
    """Parses `<seed:think>…</seed:think>`."""

    start = "<seed:think>"
    end = "</seed:think>"


def _write(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(f"<parameter={key}>{as_text(value)}</parameter>\n" for key, value in given.items())
        written.append(f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>")
    return "\n".join(written)


FAMILY = Family(
    name="seed_oss",
    markup="<seed:tool_call><function=NAME><parameter=KEY>…</parameter></function></seed:tool_call>",
    tool=SeedOssParser,
    reasoning=SeedThinkParser,
    hints=("<seed:tool_call>",),
    reasoning_hints=("<seed:think>",),
    examples=(
        "<seed:think>Hm 🤔</seed:think>Look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich 🌧️"
        "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call> done",
        "<seed:tool_call>\n<function=f>\n<parameter=city>cut",
        "Write <seed:tool_call> in your prompt.",
    ),
    fragments=(
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        "<seed:think>",
        "</seed:think>",
        "</seed:",
    ),
    write=_write,
    untyped=True,
)
