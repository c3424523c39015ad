"""Reasoning between `<think>` and `</think>`, which many families share, and its exceptions."""

from __future__ import annotations

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import Content, Event, PlainKind
from services.postprocess.parsers.families.family import EngineNames, Family
from services.postprocess.parsers.reasoning.think import ThinkParser

_START, _END = "<think>", "</think>"


class ImpliedThinkParser(ThinkParser):
    """For models that always reason, even without the opening tag in prompt and output, such as DeepSeek R1."""

    implied = True


class AppendedThinkParser(Parser):
    """Returns all output as content, with the opening tag that the prompt contains put before it."""

    tag = "<think>"
    markers = frozenset(("<think>", "</think>"))

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._due = context.prompt_tail.rstrip().endswith(self.tag)

    def feed(self, text: str) -> list[Event]:
        opening, self._due = self.tag + "\n" if self._due else "", False
        return [Content(opening + text)]

    def plain(self, text: str) -> PlainKind:
        return None if self._due else Content

    def finish(self) -> list[Event]:
        return []


def _lacks_the_tag(template: str, special: frozenset[str]) -> bool:
    """Returns whether a template is the first of R1, which has no opening tag; the model reasons nevertheless."""
    reasons = _END in template or _START in special
    return reasons and "<｜Assistant｜>" in template and _START not in template


DEEPSEEK_R1 = Family(
    name="deepseek_r1",
    reasoning=ImpliedThinkParser,
    rule=_lacks_the_tag,
    engine_reasoning=(EngineNames(sglang="deepseek-r1"),),
)
FAMILY = Family(
    name="think",
    reasoning=ThinkParser,
    aliases=("qwen3", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3", "step3", "hy_v3"),
    reasoning_hints=(_START, _END),
    reasoning_special=(_START,),
    engine_reasoning=(EngineNames(vllm="qwen3", sglang="qwen3"),),
)
APPENDED = Family(name="minimax_append_think", reasoning=AppendedThinkParser)
"""Only by name: `auto` never selects it."""
