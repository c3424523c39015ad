"""Which parser a name stands for, and which one a model needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import invalid
from services.postprocess.parsers.contract import Chain, Parser, ParserContext
from services.postprocess.parsers.deepseek import DeepSeekParser
from services.postprocess.parsers.harmony import HarmonyParser
from services.postprocess.parsers.hermes import HermesParser
from services.postprocess.parsers.llama import LlamaJsonParser
from services.postprocess.parsers.mistral import MistralParser
from services.postprocess.parsers.pythonic import PythonicParser
from services.postprocess.parsers.think import ImpliedThinkParser, MistralThinkParser, ThinkParser

AUTO = "auto"
NONE = "none"

TOOL_PARSERS: dict[str, type[Parser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": LlamaJsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "deepseek_r1": DeepSeekParser,
    "deepseek_v3": DeepSeekParser,
    "harmony": HarmonyParser,
}

REASONING_PARSERS: dict[str, type[Parser]] = {
    "think": ThinkParser,
    "qwen3": ThinkParser,
    "deepseek_r1": ImpliedThinkParser,
    "deepseek_v3": ThinkParser,
    "mistral": MistralThinkParser,
    "harmony": HarmonyParser,
}


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The parsers of a model or a stream; empty for none."""

    tool: str = ""
    reasoning: str = ""


def own_class(name: str) -> type[Parser]:
    """Imports a parser of the user's own.

    Raises:
        SluiceError: INVALID_ARGUMENT when `name` is not `module:Class` of a Parser that can be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise invalid(f"The parser {name} cannot be imported ({type(error).__name__}: {error}).") from error
    if not (isinstance(found, type) and issubclass(found, Parser)):
        raise invalid(f"The parser {name} is no services.postprocess.parsers.contract.Parser.")
    return found


class Registry:
    """The parsers of this process.

    Args:
        own: names `module:Class` that streams may use besides the built-in ones.
    """

    def __init__(self, own: Iterable[str] = ()) -> None:
        self.own = frozenset(own)

    def check(self, names: ParserNames) -> None:
        """SluiceError(INVALID_ARGUMENT) for a name that is not there, with those that are."""
        self._check("tool_parser", names.tool, TOOL_PARSERS)
        self._check("reasoning_parser", names.reasoning, REASONING_PARSERS)

    def _check(self, field: str, name: str, known: Iterable[str]) -> None:
        if name and name not in (AUTO, NONE) and name not in known and name not in self.own:
            there = ", ".join(sorted({*known, *self.own, AUTO}))
            raise invalid(
                f"The {field.replace('_', ' ')} {name!r} is not available; there is {there}.",
                param=field,
                code="no_such_parser",
            )

    def is_own(self, names: ParserNames) -> bool:
        """Whether one of them is the user's own, which runs in a process of its own."""
        return names.tool in self.own or names.reasoning in self.own


def markers_of(names: ParserNames) -> frozenset[str]:
    """Special tokens that these parsers must see."""
    return _class(names.tool, TOOL_PARSERS).markers | _class(names.reasoning, REASONING_PARSERS).markers


def build(names: ParserNames, context: ParserContext) -> Parser:
    """The parser of one stream; at least one name is not empty."""
    if HarmonyParser in (_class(names.tool, TOOL_PARSERS), _class(names.reasoning, REASONING_PARSERS)):
        return HarmonyParser(context, calls=bool(names.tool))
    if not names.tool:
        return _class(names.reasoning, REASONING_PARSERS)(context)
    tools = _class(names.tool, TOOL_PARSERS)(context)
    return Chain(_class(names.reasoning, REASONING_PARSERS)(context), tools) if names.reasoning else tools


def _class(name: str, known: dict[str, type[Parser]]) -> type[Parser]:
    if not name:
        return Parser
    return known[name] if name in known else own_class(name)
