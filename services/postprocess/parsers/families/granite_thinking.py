"""The reasoning of Granite 3.2 and 3.3, which begins and ends with sentences."""

from __future__ import annotations

from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.reasoning.think import ThinkParser


class GraniteThinkParser(ThinkParser):
    """Parses `Here is my thought process: … Here is my response: …`."""

    start = "Here is my thought process:"
    more_starts = ("Here's my thought process:",)
    end = "Here is my response:"
    more_ends = ("Here's my response:",)


FAMILY = Family(
    name="granite_thinking",
    reasoning=GraniteThinkParser,
    aliases=("granite",),
    reasoning_hints=("Here is my thought process:",),
)
