"""What a family of models declares about its output: parsers, names, marks of its template, and examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.postprocess.parsers.base import Parser

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: of its tool parser, and of its reasoning parser if it has one of its own.
        markup: shows the format in the documentation.
        tool: the tool parser; None for a family that is only about reasoning.
        reasoning: the reasoning parser; None if the family has none of its own.
        reasoning_name: of a built-in reasoning parser that its models need; for the examples.
        aliases: further names of both parsers, such as those of vLLM and SGLang.
        hints: texts of which a chat template of the family contains one.
        special: special tokens of which a tokenizer of the family has one.
        reasoning_hints: as `hints`, of templates whose models reason in this format.
        examples: outputs with calls of the tools `get_weather(city: string, days: integer)`, `f(city: string)` and `g`,
            and with reasoning; right ones and slips that models make. The tests cut and damage them in every way.
        fragments: pieces of the markup, of which the tests make nonsense.
        write: writes calls as the models do; None for a family without calls. The tests parse what it writes.
        untyped: the text does not tell strings from other values, the schemas of the tools do.
    """

    name: str
    markup: str
    examples: tuple[str, ...]
    fragments: tuple[str, ...]
    tool: type[Parser] | None = None
    reasoning: type[Parser] | None = None
    reasoning_name: str = ""
    aliases: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    reasoning_hints: tuple[str, ...] = ()
    write: Callable[[Sequence[Call]], str] | None = None
    untyped: bool = False


def as_text(value: object) -> str:
    """Returns a value as templates write it between tags: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call], name: str = "name", arguments: str = "arguments") -> str:
    """Returns calls as a JSON array of objects with these keys."""
    return json.dumps([{name: called, arguments: given} for called, given in calls], ensure_ascii=False)
