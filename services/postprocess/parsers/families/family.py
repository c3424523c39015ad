"""What a family of models declares about its output: parsers, names, and marks of its template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.postprocess.parsers.base import Parser


@dataclass(frozen=True)
class EngineNames:
    """What engines call a parser of a family; empty where it is the family's own name.

    Attributes:
        mark: text of the chat templates to which the names apply; empty for all.
    """

    vllm: str = ""
    sglang: str = ""
    mark: str = ""

    def of(self, engine: str) -> str:
        """Returns the name in one engine."""
        return self.vllm if engine == "vllm" else self.sglang


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: of its tool parser, and of its reasoning parser if it has one of its own.
        tool: the tool parser; None for a family that is only about reasoning.
        reasoning: the reasoning parser; None if the family has none of its own.
        aliases: further names of both parsers, such as those of vLLM and SGLang.
        hints: texts of which a chat template of the family contains one.
        special: special tokens of which a tokenizer of the family has one.
        reasoning_hints: as `hints`, of templates whose models reason in this format.
        reasoning_special: as `special`, of tokenizers whose models reason in this format.
        rule: decides from a template and the special tokens, for a family that no single mark tells; replaces them.
        engine_tools: of the tool parser; the first that applies.
        engine_reasoning: of the reasoning parser. Those with a mark apply to templates with any reasoning parser.
    """

    name: str
    tool: type[Parser] | None = None
    reasoning: type[Parser] | None = None
    aliases: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    reasoning_hints: tuple[str, ...] = ()
    reasoning_special: tuple[str, ...] = ()
    rule: Callable[[str, frozenset[str]], bool] | None = None
    engine_tools: tuple[EngineNames, ...] = ()
    engine_reasoning: tuple[EngineNames, ...] = ()

    def writes_calls(self, template: str, special: frozenset[str]) -> bool:
        """Returns whether a model with this template and these special tokens writes calls in the family's format."""
        return self.tool is not None and self._has_mark(template, special, self.hints, self.special)

    def writes_thoughts(self, template: str, special: frozenset[str]) -> bool:
        """Returns whether a model with this template and these special tokens reasons in the family's format."""
        marks = self.reasoning_hints, self.reasoning_special
        return self.reasoning is not None and self._has_mark(template, special, *marks)

    def _has_mark(
        self, template: str, special: frozenset[str], hints: tuple[str, ...], tokens: tuple[str, ...]
    ) -> bool:
        if self.rule is not None:
            return self.rule(template, special)
        return not special.isdisjoint(tokens) or any(hint in template for hint in hints)
