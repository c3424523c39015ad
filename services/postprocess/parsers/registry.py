"""Registry of parsers by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

from services.common.base.errors import invalid, quoted
from services.common.packages.engines import TESTED_VERSIONS
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import Chain, Parser, ParserContext
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.engine_names import ENGINES, bare, engine_of, nearest
from services.postprocess.parsers.families import FAMILIES
from services.postprocess.parsers.families.harmony import HarmonyParser
from services.postprocess.parsers.reasoning.think import ThinkParser
from services.postprocess.parsers.reasoning.unclosed_reasoning import UnclosedReasoningChain

AUTO = "auto"
NONE = "none"
_NOT_NAMED = ("", AUTO, NONE)

TOOL_PARSERS: dict[str, type[Parser]] = {
    name: family.tool for family in FAMILIES if family.tool for name in (family.name, *family.aliases)
}

REASONING_PARSERS: dict[str, type[Parser]] = {
    name: family.reasoning for family in FAMILIES if family.reasoning for name in (family.name, *family.aliases)
}


def own_class(name: str) -> type[Parser]:
    """Imports a custom parser.

    Raises:
        SluiceError: INVALID_ARGUMENT unless `name` is the `module:Class` of an importable Parser.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a module can raise anything
        raise invalid(
            f"The parser {name} cannot be imported ({type(error).__name__}: {error}); check its module and PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Parser)):
        raise invalid(f"The parser {name} is not a subclass of sluice.parsers.Parser.")
    return found


class ParserRegistry:
    """The parsers available in this process.

    Args:
        own: names `module:Class` of custom parsers.
        engines: engines whose parsers are available as `engine:name`.
    """

    def __init__(self, own: Iterable[str] = (), engines: Iterable[str] = ()) -> None:
        self.own = frozenset(own)
        self.engines = frozenset(engines)

    def check(self, names: ParserNames) -> None:
        """Raises SluiceError (INVALID_ARGUMENT) for an unavailable parser, or a pair not from the same engine."""
        tool, reasoning = names.tool, names.reasoning
        self._check("tool_parser", tool, TOOL_PARSERS)
        self._check("reasoning_parser", reasoning, REASONING_PARSERS)
        if tool in _NOT_NAMED or reasoning in _NOT_NAMED:
            return
        if engine_of(tool) != engine_of(reasoning):
            raise invalid(
                f"The parsers {tool} and {reasoning} cannot be combined, because an engine's parser needs the tokens; "
                "choose both from one engine, or none from an engine.",
                param="reasoning_parser",
                code="parsers_do_not_fit",
            )

    def _check(self, field: str, name: str, known: Mapping[str, type[Parser]]) -> None:
        if name in _NOT_NAMED or name in known or name in self.own:
            return
        problem = f"The {field.replace('_', ' ')} {quoted(name)} is not available"
        if engine := engine_of(name):
            shipped = ENGINES[engine].of(field.removesuffix("_parser"))
            if bare(name) not in shipped:
                similar = ", ".join(f"{engine}:{found}" for found in nearest(bare(name), shipped)) or "none"
                raise invalid(
                    f"{problem}: {engine} {TESTED_VERSIONS[engine]} does not have it; similar names: {similar}.",
                    param=field,
                    code="no_such_parser",
                )
            if engine in self.engines:
                return
            raise invalid(
                f"{problem}; start postprocess with --native-parsers {engine}.", param=field, code="no_such_parser"
            )
        similar = ", ".join(nearest(name, frozenset(known)))
        available = ", ".join(sorted({*known, *self.own, AUTO}))
        raise invalid(
            f"{problem}; {f'similar names: {similar}; ' if similar else ''}use one of {available}.",
            param=field,
            code="no_such_parser",
        )


def markers_of(names: ParserNames) -> frozenset[str]:
    """Returns the special tokens that these parsers need in the text."""
    return _class(names.tool, TOOL_PARSERS).markers | _class(names.reasoning, REASONING_PARSERS).markers


def build(names: ParserNames, context: ParserContext) -> Parser:
    """Creates the parser of one stream; at least one name must be set."""
    tool_class, reasoning_class = _class(names.tool, TOOL_PARSERS), _class(names.reasoning, REASONING_PARSERS)
    if HarmonyParser in (tool_class, reasoning_class):
        harmony = tool_class is HarmonyParser
        parser = HarmonyParser(context, calls=harmony)
        return parser if harmony or not names.tool else Chain(parser, tool_class(context))
    if not names.tool:
        return reasoning_class(context)
    tools = tool_class(context)
    if not names.reasoning:
        return tools
    reasoning = reasoning_class(context)
    if isinstance(reasoning, ThinkParser) and isinstance(tools, CallParser) and tools.marked:
        return UnclosedReasoningChain(reasoning, tools)
    return Chain(reasoning, tools)


def _class(name: str, known: dict[str, type[Parser]]) -> type[Parser]:
    if not name:
        return Parser
    return known[name] if name in known else own_class(name)
