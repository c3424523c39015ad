"""Seed-OSS: the calls of Qwen3-Coder within tags of its own."""

from __future__ import annotations

from dataclasses import replace

from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.families.qwen3_coder import Qwen3CoderParser
from services.postprocess.parsers.reasoning.think import ThinkParser


class SeedOssParser(Qwen3CoderParser):
    """Parses `<seed:tool_call><function=f><parameter=x>…</parameter></function></seed:tool_call>`."""

    swallowed = ("<seed:tool_call>", "</seed:tool_call>")
    markers = frozenset(swallowed)
    form = replace(Qwen3CoderParser.form, lines=False)


class SeedThinkParser(ThinkParser):
    """Parses `<seed:think>…</seed:think>`."""

    start = "<seed:think>"
    end = "</seed:think>"


FAMILY = Family(
    name="seed_oss",
    tool=SeedOssParser,
    reasoning=SeedThinkParser,
    hints=("<seed:tool_call>",),
    reasoning_hints=("<seed:think>",),
)
