"""Parsers under test: what they say about a text, and texts of every format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning, merge
from services.postprocess.parsers.registry import build
from tests.support.data.family_examples import EXAMPLES, FRAGMENTS


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool of the OpenAI form."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = (
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("f", city={"type": "string"}),
    tool("g"),
)


@dataclass(frozen=True)
class ParsedDelta:
    """An answer as its events say it; `order` has the kinds in turn."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    degraded: frozenset[str]
    order: tuple[str, ...]


def said(events: Iterable[Event]) -> ParsedDelta:
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
    return ParsedDelta(
        "".join(event.text for event in plain if isinstance(event, Content)),
        "".join(event.text for event in plain if isinstance(event, Reasoning)),
        tuple((start.name, arguments.get(start.call, ""), start.id) for start in starts),
        frozenset(event.reason for event in events if isinstance(event, Degraded)),
        tuple(type(event).__name__ for event in plain),
    )


def parsed(
    names: ParserNames, pieces: Sequence[str], context: ParserContext | None = None, plain: bool = False
) -> ParsedDelta:
    """Returns the output of a parser for a text in pieces.

    Args:
        plain: use `Parser.plain` for the pieces for which it returns an event.
    """
    parser = build(names, context or ParserContext(TOOLS, identity="request-1"))
    events: list[Event] = []
    for piece in pieces:
        if piece:
            before = parser.held, parser.reasoning
            kind = parser.plain(piece) if plain else None
            events += parser.feed(piece) if kind is None else [kind(piece)]
            if kind is not None:
                assert (parser.held, parser.reasoning) == before == ("", kind is Reasoning)
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
    ("deepseek_r1", "deepseek_v3"): (
        "<think>\n一 🤔\n</think>Text <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        f"{_CITY}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{oops\n```<｜tool▁call▁end｜> more",
    ),
    ("qwen3_coder", "qwen3"): (
        '<think>\nHm 🤔\n</think>\n\nText.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich "🌧️"\n\nx\n'
        '</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{"a": [1]}\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<function=g>\n<parameter=a>True</parameter><parameter=b>nota\tbene</parameter></function> rest",
        "<tool_call>\n<function=f>\n<parameter=city>\nZür",
        "<tool_call>\n<function=f>\noops</function></tool_call> more",
        "<function= >no name</function>",
    ),
    ("glm45", ""): (
        "Look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 🌧️</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>f</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        "<tool_call>f<arg_key>a</arg_key>oops</tool_call> more",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>cut",
    ),
    ("minimax_m2", ""): (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich 🌧️</parameter>\n'
        '<parameter name="n">1.5</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call> done',
        '<invoke name="f"><parameter nam="a">1</parameter></invoke> more',
    ),
    ("kimi_k2", ""): (
        "One.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_CITY}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>no separator {}<|tool_call_end|>",
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{oops}<|tool_call_end|> more",
    ),
    ("granite", ""): (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_CITY}}}, {{"name": "f", "arguments": {{}}}}]',
        "<|tool_call|>nothing",
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
    ("deepseek_r1", "deepseek_v3"): (
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>f",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "<think>",
        "</think>",
    ),
    ("qwen3_coder", "qwen3"): (
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=get_weather>",
        "</function>",
        "<parameter=city>\n",
        "<parameter=x>",
        "\n</parameter>",
        "</param",
        "<think>",
        "</think>",
    ),
    ("glm45", ""): (
        "<tool_call>f",
        "</tool_call>",
        "<arg_key>city</arg_key>",
        "<arg_key>x</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</arg",
    ),
    ("minimax_m2", ""): (
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="f">',
        "</invoke>",
        '<parameter name="city">',
        "</parameter>",
        "</par",
    ),
    ("kimi_k2", ""): (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_",
    ),
    ("granite", ""): ("<|tool_call|>", "<|tool_call|>[", '{"name": "g", "arguments": {}}', "<|tool_"),
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

RECORDED |= EXAMPLES
MARKUP |= FRAGMENTS
