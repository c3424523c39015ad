"""Parsers under test: what they say about a text, and texts of every format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.postprocess.parsers.contract import ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning, merge
from services.postprocess.parsers.registry import ParserNames, build


def tool(name: str) -> dict[str, Any]:
    """A tool of the OpenAI form."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TOOLS = (tool("get_weather"), tool("f"), tool("g"))


@dataclass(frozen=True)
class Said:
    """An answer as its events say it; `order` has the kinds in turn."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    degraded: frozenset[str]
    order: tuple[str, ...]


def said(events: Iterable[Event]) -> Said:
    """What events come to, however they were cut."""
    events = list(events)
    plain = merge(event for event in events if not isinstance(event, Degraded))
    arguments: dict[int, str] = {}
    for event in plain:
        if isinstance(event, CallArguments):
            arguments[event.call] = arguments.get(event.call, "") + event.text
    starts = [event for event in plain if isinstance(event, CallStart)]
    assert [start.call for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    return Said(
        "".join(event.text for event in plain if isinstance(event, Content)),
        "".join(event.text for event in plain if isinstance(event, Reasoning)),
        tuple((start.name, arguments.get(start.call, ""), start.id) for start in starts),
        frozenset(event.reason for event in events if isinstance(event, Degraded)),
        tuple(type(event).__name__ for event in plain),
    )


def parsed(names: ParserNames, pieces: Sequence[str], context: ParserContext | None = None) -> Said:
    """What a parser says about a text in pieces."""
    parser = build(names, context or ParserContext(TOOLS, identity="request-1"))
    events: list[Event] = []
    for piece in pieces:
        if piece:
            events += parser.feed(piece)
    return said(events + parser.finish())


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """A text cut at places modulo its length."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


_CITY = '{"city": "Zürich 🌧️\\n\\"x\\" {}", "days": [1, 2.5e3, true, null], "deep": {"a": {}}}'

# Answers as the models write them, by parser: (tool parser, reasoning parser) → texts.
RECORDED: dict[tuple[str, str], tuple[str, ...]] = {
    ("hermes", ""): (
        "Let me look. 😀\n<tool_call>\n" + f'{{"name": "get_weather", "arguments": {_CITY}}}' + "\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"x": '
        '"</tool_call>"}}\n</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> done',
        '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call><tool_call>{"name": oops}</tool_call> more',
        '<tool_call>{"name": "f", "arguments": {"a": "cut',
    ),
    ("qwen", "qwen3"): (
        "<think>\nThe user wants\n\nweather 🌦.\n</think>\n\n<tool_call>\n"
        + f'{{"name": "get_weather", "arguments": {_CITY}}}\n</tool_call>',
        "<think>never closed <tool_call>",
        "no thoughts, <think>late</think> and <b>tags</b>",
    ),
    ("llama3_json", ""): (
        f'{{"name": "get_weather", "parameters": {_CITY}}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        '{"name": "Bob", "age": 3}',
        '  {"temperature": 3} and text',
        '<|python_tag|>print("hello")',
    ),
    ("pythonic", ""): (
        "[get_weather(city='Zürich 🌧️ \"x\"', days=[1, -2.5, True, None,], deep={'a': {}}), f()]",
        '[f(a="\\u00e9\\n\\x41 \\\' \\q", b=1e5)]<|python_end|>',
        "[1, 2, 3] is a list",
        "<|python_start|>[f(a=1), g(b=oops)]<|python_end|>",
        "[f(a=12",
    ),
    ("mistral", ""): (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_CITY}}}, {{"name": "f", "arguments": {{}}}}]',
        f"Looking. [TOOL_CALLS]get_weather[ARGS]{_CITY}[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{{}}",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": }}] tail',
        "[TOOL_CALLS]no brace at all",
    ),
    ("mistral", "mistral"): ('[THINK]Hm 🤔[/THINK]Well. [TOOL_CALLS]f[ARGS]{"a": 1}',),
    ("deepseek_v3", "deepseek_r1"): (
        "Thoughts first.\n</think>\n\nText<｜tool▁calls▁begin｜>"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{_CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "<think>\n</think><｜tool▁call▁begin｜>type<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    ),
    ("", "think"): ("<think>\n一二三 😀\n</think>\n\nThe answer.", "  <thin air", "<think></think>"),
    ("harmony", "harmony"): (
        "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary to=functions."
        f"get_weather <|constrain|>json<|message|>{_CITY}<|call|>",
        "<|channel|>final<|message|>Grüße 😀",
        "<|channel|>commentary<|message|>First f.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
        "<|message|>{oops<|end|><|start|>assistant<|channel|>final<|message|>Done.",
        "no markup",
    ),
}

WORDS = ("w1 ", " w2", "😀", "é", "\n", "  ", "a", '"', "\\", "{", "}", "[", "]", ",", ":", "1", "-2.5", "true", "null")
COMMON = (
    '{"name": "f", "arguments": {',
    '"a": 1',
    '"b": "x\\u00e9"',
    "}}",
    '"name"',
    '"arguments"',
    "f",
    "g(",
    ")",
    "<",
)
MARKUP: dict[tuple[str, str], tuple[str, ...]] = {
    ("hermes", ""): ("<tool_call>", "</tool_call>", "<tool_"),
    ("qwen", "qwen3"): ("<tool_call>", "</tool_call>", "<think>", "</think>", "</thi"),
    ("llama3_json", ""): ("<|python_tag|>", ";", '{"name": "g", "parameters": {}}'),
    ("pythonic", ""): ("<|python_start|>", "<|python_end|>", "[f(", "a=", "'x\\'", "None", "{'k': "),
    ("mistral", ""): ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[{", "[TOOL"),
    ("mistral", "mistral"): ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ("deepseek_v3", "deepseek_r1"): (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "function",
        "\n```json\n",
        "\n```",
        "</think>",
    ),
    ("", "think"): ("<think>", "</think>", "</think", "<th"),
    ("harmony", "harmony"): (
        "<|start|>assistant",
        "<|channel|>analysis",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f ",
        "<|message|>",
        "<|end|>",
        "<|call|>",
    ),
}
