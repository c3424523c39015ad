"""Selects the parsers of a stream from its options and model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from services.common.base.errors import SluiceError, invalid, quoted
from services.common.net.intake.json_intake import foreign_json
from services.postprocess.detokenize.detokenizer import MAX_TAIL
from services.postprocess.detokenize.stream import Limits, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls.call_names import NOT_CHOSEN
from services.postprocess.parsers.engine_names import engine_of
from services.postprocess.parsers.registry import AUTO, NONE, ParserRegistry

NO_PARSER = "tool_parser_unknown"
REPLACED = "engine_parser_replaced"


@dataclass(frozen=True, slots=True)
class ParserSelection:
    """Selected parsers of a stream.

    Attributes:
        names: empty for a plain stream.
        context: for the parser.
        degraded: why a requested parser is missing; empty: none is missing.
    """

    names: ParserNames
    context: ParserContext
    degraded: str = ""


_PLAIN = ParserSelection(ParserNames(), ParserContext())


def plan_of(
    options: StreamOptions, vocabulary: Vocabulary, registry: ParserRegistry, limits: Limits, identity: str
) -> ParserSelection:
    """Returns the parsers selected by stream options.

    Args:
        identity: of the stream; ids of its tool calls derive from it.

    Raises:
        SluiceError: INVALID_ARGUMENT for an unknown parser, invalid tools or an invalid tool_choice.
    """
    if not options.tool_parser and not options.reasoning_parser and not options.tools_json:
        return _PLAIN
    names = ParserNames(options.tool_parser, options.reasoning_parser)
    registry.check(names)
    tools = _tools(options.tools_json, limits) if options.tools_json else ()
    choice = _choice(options.tool_choice_json) if options.tool_choice_json else ""
    names = _resolve(names, bool(tools), vocabulary)
    if choice == NONE or options.guided:
        names = replace(names, tool="")
    only = choice if choice not in ("", AUTO, NONE, "required") else ""
    calls = choice != NONE and not options.guided
    context = ParserContext(
        tools=tools,
        required=calls and choice == "required",
        only=only.removeprefix(_NAMED),
        single=options.single_tool_call,
        guided=options.guided or options.guided_calls,
        prompt_tail=_tail(options, vocabulary) if names.reasoning or names.tool else "",
        identity=identity,
        prompt_ids=options.prompt_tail,
        template_kwargs=_kwargs(options.template_kwargs_json) if options.template_kwargs_json else {},
        source=vocabulary.source,
        thinking=options.thinking,
    )
    wanted = calls and bool(options.tool_parser) and bool(tools) and options.tool_parser != NONE
    degraded = NO_PARSER if wanted and not names.tool else ""
    automatic = AUTO in (options.tool_parser if names.tool else "", options.reasoning_parser if names.reasoning else "")
    if automatic and vocabulary.replaces_engine:
        degraded = REPLACED
    return ParserSelection(names, context, NOT_CHOSEN if degraded and (only or context.required) else degraded)


def _resolve(names: ParserNames, tools: bool, vocabulary: Vocabulary) -> ParserNames:
    tool = "" if names.tool == NONE else names.tool
    reasoning = "" if names.reasoning == NONE else names.reasoning
    if tool == AUTO:
        tool = vocabulary.parsers.tool if tools else ""
    if reasoning == AUTO:
        reasoning = vocabulary.parsers.reasoning
        if tool and engine_of(tool) != engine_of(reasoning):
            reasoning = ""
    return ParserNames(tool, reasoning)


def _tools(tools_json: bytes, limits: Limits) -> tuple[dict[str, Any], ...]:
    if len(tools_json) > limits.max_tools_bytes:
        raise invalid(f"tools has {len(tools_json)} bytes; send at most {limits.max_tools_bytes}.", param="tools")
    tools = _load(tools_json, "tools")
    if not isinstance(tools, list):
        raise invalid("tools must be an array.", param="tools")
    for index, tool in enumerate(tools):
        if problem := _problem_of(tool):
            raise invalid(problem, param=f"tools[{index}]")
    return tuple(tools)


def _problem_of(tool: Any) -> str:
    """Returns why a value is not a tool in OpenAI format; empty if it is."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return "A tool must have a function with a name."
    if tool.get("type", "function") != "function":
        return f"A tool's type must be function, not {quoted(tool['type'])}."
    if not isinstance(function.get("parameters") or {}, dict):
        return f"The parameters of {function['name']} must be a JSON Schema object."
    return ""


_NAMED = "function:"


def _choice(choice_json: bytes) -> str:
    """Returns `none`, `auto`, `required`, empty, or `function:` and the name of the only function allowed."""
    choice = _load(choice_json, "tool_choice")
    if choice is None or choice in ("", AUTO, NONE, "required"):
        return choice or ""
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid("tool_choice must be none, auto, required or a function.", param="tool_choice")
    return _NAMED + str(function["name"])


def _kwargs(text: bytes) -> dict[str, Any]:
    kwargs = _load(text, "chat_template_kwargs")
    if not isinstance(kwargs, dict):
        raise invalid("chat_template_kwargs must be an object.", param="chat_template_kwargs")
    return kwargs


def _load(text: bytes, field: str) -> Any:
    return foreign_json(text, field)


def _tail(options: StreamOptions, vocabulary: Vocabulary) -> str:
    try:
        return vocabulary.text_of(options.prompt_tail[-MAX_TAIL:])
    except SluiceError:
        return ""  # creating the stream raises the error
