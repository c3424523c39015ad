"""MiniMax M3: elements named like the arguments, nested, behind a namespace; thoughts between tags of their own."""

from __future__ import annotations

import json
import re
from typing import Any

from services.common.base.sendable_text import sendable
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls.argument_types import ANY, UNDECLARED, ArgumentType, as_json, type_of
from services.postprocess.parsers.calls.call_names import MAX_NAME, Named
from services.postprocess.parsers.calls.parser import Body, CallParser
from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.reasoning.think import ThinkParser
from services.postprocess.parsers.scanning.json_scan import Malformed
from services.postprocess.parsers.scanning.markers import Markers, TextBuffer

NAMESPACE = "]<]minimax[>["
MAX_DEPTH = 64
"""Levels of arguments; with more the call is damaged, and becomes text."""
_END = f"{NAMESPACE}</invoke>"
_NAME_END, _AT_END = Markers('">'), Markers(_END)
_TAG = re.compile(re.escape(NAMESPACE) + r"<(/?)([^<>/]+)>")

_Children = list[tuple[str, Any]]


class MiniMaxM3Body(Body):
    """Body of one call: its name, and elements that are converted once it is complete.

    Args:
        schemas: of the tools' parameters, by name.
    """

    def __init__(self, schemas: dict[str, Any]) -> None:
        self._schemas = schemas
        self._function = ""
        self._text = TextBuffer()

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        if not self._function:
            stop, end = _NAME_END.find(text, at)
            if stop - at > MAX_NAME:
                raise Malformed(at + MAX_NAME)
            if not end:
                return at, None
            name = text[at:stop]
            self._function, self.calling = name, True
            return stop + len(end), Named(name)
        stop, end = _AT_END.find(text, at)
        self._text.add(text[at:stop])
        if not end:
            return stop, None
        arguments = self._arguments(stop)
        self.done, self.calling = True, False
        return stop, sendable(json.dumps(arguments, ensure_ascii=False))

    def _arguments(self, at: int) -> Any:
        schema = self._schemas.get(self._function)
        elements = _elements(self._text.text, at)
        if not elements:
            return {}
        return _object(elements, schema if isinstance(schema, dict) else {}, schema, UNDECLARED)


def _elements(text: str, at: int) -> _Children:
    """Returns the elements of a text with their values: text, or elements; raises Malformed for anything else."""
    stack: list[tuple[str, _Children]] = [("", [])]
    end = 0
    for tag in _TAG.finditer(text):
        between = text[end : tag.start()]
        closes, name = bool(tag[1]), tag[2]
        opened = text.startswith(f"{NAMESPACE}<{stack[-1][0]}>", end - len(f"{NAMESPACE}<{stack[-1][0]}>"))
        end = tag.end()
        if not closes:
            if between.strip() or len(stack) > MAX_DEPTH:
                raise Malformed(at)
            stack.append((name, []))
            continue
        found, children = stack.pop()
        if found != name or not stack or (children and between.strip()):
            raise Malformed(at)
        stack[-1][1].append((name, children if children else between if opened else ""))
    if len(stack) != 1 or text[end:].strip():
        raise Malformed(at)
    return stack[0][1]


def _object(elements: _Children, schema: Any, root: Any, undeclared: ArgumentType = ANY) -> dict[str, Any]:
    """Returns named elements as an object; a name that is repeated has a list.

    Args:
        undeclared: type of elements without a schema.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found: dict[str, list[Any]] = {}
    for name, value in elements:
        inner = properties.get(name) if isinstance(properties, dict) else None
        found.setdefault(name, []).append(_value(value, inner, root, undeclared))
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _value(value: Any, schema: Any, root: Any, undeclared: ArgumentType = ANY) -> Any:
    kind = type_of(schema, root) if isinstance(schema, dict) else undeclared
    if isinstance(value, str):
        if kind.text:
            return None if kind.nullable and value.strip() in ("null", "None") else value
        if not value.strip() and {"array", "object"} & {*kind.kinds}:
            return [] if "array" in kind.kinds else {}
        return json.loads(as_json(value, kind))
    if "array" in kind.kinds or (not kind.kinds and {name for name, _ in value} == {"item"}):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [_value(child, items, root) for _, child in value]
    return _object(value, schema, root)


class MiniMaxM3Parser(CallParser):
    """Parses `]<]minimax[>[<invoke name="f">]<]minimax[>[<x>…]<]minimax[>[</x>]<]minimax[>[</invoke>`."""

    starts = (f'{NAMESPACE}<invoke name="',)
    ends = (_END,)
    swallowed = (f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</tool_call>")
    markers = frozenset((NAMESPACE,))

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in context.tools}

    def body(self) -> Body:
        return MiniMaxM3Body(self._schemas)


class MiniMaxM3ThinkParser(ThinkParser):
    """Parses `<mm:think>…</mm:think>`."""

    start = "<mm:think>"
    end = "</mm:think>"


FAMILY = Family(
    name="minimax_m3",
    tool=MiniMaxM3Parser,
    reasoning=MiniMaxM3ThinkParser,
    aliases=("minimax-m3",),
    hints=(NAMESPACE, "]<]minimax["),
    special=(NAMESPACE,),
    reasoning_hints=("<mm:think>",),
)
