"""What models write that is not quite their format: types, missing and stray tags, lost headers, calls in reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from tests.support.oracles.parsing import ParsedDelta, parsed, tool

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TOOLS = (
    tool(
        "f",
        zip=OPTIONAL,
        word={"type": ["string", "null"]},
        code={"enum": ["1", "2"]},
        place={"$ref": "#/$defs/City"},
        a={"type": "string"},
        b={"type": "string"},
        items={"type": "array"},
        flag={"type": "boolean"},
    ),
    tool("g", a={"type": "string"}),
)
TOOLS[0]["function"]["parameters"]["$defs"] = {"City": {"type": "string"}}
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


@dataclass(frozen=True)
class Case:
    """A text, and what it is parsed to."""

    parser: str
    text: str
    calls: Sequence[tuple[str, Any]] = ()
    content: str = ""
    reasoning: str = ""
    degraded: set[str] = field(default_factory=set)
    reasoning_parser: str = ""


def qwen(*arguments: tuple[str, str], end: str = "</function>") -> str:
    """One call of Qwen3-Coder."""
    return "<function=f>\n" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments) + end


MALFORMED, REPAIRED, INCOMPLETE = "tool_call_malformed", "tool_call_repaired", "tool_call_incomplete"
CASES = {
    "nullable strings stay strings": Case(
        "qwen3_coder",
        qwen(("zip", "94103"), ("word", "true"), ("code", "1"), ("place", "7"), ("unknown", "5.5")),
        [("f", {"zip": "94103", "word": "true", "code": "1", "place": "7", "unknown": "5.5"})],
    ),
    "null is null where it is allowed": Case(
        "qwen3_coder",
        qwen(("zip", "null"), ("word", "None"), ("a", "null")),
        [("f", {"zip": None, "word": None, "a": "null"})],
    ),
    "values in Python's notation": Case(
        "qwen3_coder",
        qwen(("items", "['x', ('y', None)]"), ("flag", "TRUE")),
        [("f", {"items": ["x", ["y", None]], "flag": True})],
    ),
    "end of the call without the end of the value": Case(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        "<parameter=a>\ny\n</parameter>\n</function>\n</tool_call>\nDone.",
        [("f", {"a": "x"}), ("g", {"a": "y"})],
        "\nDone.",
        degraded={REPAIRED},
    ),
    "next argument without the end of the value": Case(
        "qwen3_coder",
        "<function=f>\n<parameter=a>\nx\n<parameter=b>\ny\n</parameter>\n</function>",
        [("f", {"a": "x", "b": "y"})],
        degraded={REPAIRED},
    ),
    "GLM's end of the call without the end of the value": Case(
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</tool_call> Done.",
        [("f", {"a": "x"})],
        " Done.",
        degraded={REPAIRED},
    ),
    "MiniMax without the end of the call": Case(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n</minimax:tool_call>',
        [("f", {"a": "x"})],
        degraded={REPAIRED},
    ),
    "end of the output after a value": Case(
        "qwen3_coder", qwen(("a", "x"), end=""), [("f", {"a": "x"})], degraded={INCOMPLETE}
    ),
    "end tag within a value": Case(
        "qwen3_coder",
        qwen(("a", "write </parameter> and </function> in it")),
        [("f", {"a": "write </parameter> and </function> in it"})],
    ),
    "text of Harmony without a header": Case(
        "harmony",
        "I'll look.<|end|><|start|>assistant<|channel|>final<|message|>World",
        content="I'll look.World",
        degraded={"harmony_header_missing"},
        reasoning_parser="harmony",
    ),
    "text of Harmony before a start": Case(
        "harmony",
        "Hello there<|start|>assistant<|channel|>final<|message|>World",
        content="Hello thereWorld",
        degraded={"harmony_header_missing"},
        reasoning_parser="harmony",
    ),
    "wrappers in a text": Case(
        "qwen3_coder",
        "Write <tool_call> in your prompt, then </tool_call>.",
        content="Write <tool_call> in your prompt, then </tool_call>.",
        degraded={MALFORMED},
    ),
    "wrapper around something else": Case(
        "qwen3_coder",
        "<tool_call>\n<terminal>\necho hello\n</function>",
        content="<tool_call>\n<terminal>\necho hello\n</function>",
        degraded={MALFORMED},
    ),
    **{
        f"wrapper of {name} in a text": Case(
            name, f"Write {wrapper} there", content=f"Write {wrapper} there", degraded={MALFORMED}
        )
        for name, wrapper in (
            ("minimax_m2", "<minimax:tool_call>"),
            ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
            ("kimi_k2", "<|tool_calls_section_begin|>"),
        )
    },
    "unknown tool after a known one, as JSON": Case(
        "llama3_json",
        '{"name":"f","parameters":{"a":1}}; {"name":"unknown","parameters":{}}',
        [("f", {"a": 1}), ("unknown", {})],
    ),
    "unknown tool after a known one, as Python": Case(
        "pythonic", "[f(a=1), unknown(b=2)]", [("f", {"a": 1}), ("unknown", {"b": 2})]
    ),
    **{
        f"stray end of {name}": Case(name, text, [("f", {})], degraded={REPAIRED})
        for name, text in (
            ("kimi_k2", f"{KIMI}<|tool_call_end|>"),
            ("qwen3_coder", "<function=f>\n</function>\n</function>"),
            ("minimax_m2", '<invoke name="f">\n</invoke>\n</invoke>'),
            ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁end｜>"),
        )
    },
    "call in unclosed reasoning of Kimi": Case(
        "kimi_k2", f"<think>thinking {KIMI}", [("f", {})], reasoning="thinking", reasoning_parser="think"
    ),
    "call in unclosed reasoning of Qwen": Case(
        "hermes",
        '<think>hm <tool_call>{"name":"f","arguments":{}}</tool_call>',
        [("f", {})],
        reasoning="hm",
        reasoning_parser="qwen3",
    ),
    "call that the reasoning only considers": Case(
        "hermes",
        '<think>hm <tool_call>{"name":"f","arguments":{}}</tool_call>?</think>No.',
        content="No.",
        reasoning='hm <tool_call>{"name":"f","arguments":{}}</tool_call>?',
        reasoning_parser="qwen3",
    ),
    "line break in a string": Case(
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a": "x\ny"}}</tool_call>',
        [("f", {"a": "x\ny"})],
        degraded={REPAIRED},
    ),
    "arguments as text": Case(
        "hermes",
        '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>',
        [("f", {"a": 1})],
        degraded={REPAIRED},
    ),
    "literals of Python": Case(
        "pythonic",
        "[f(año=2024, b=(1,2), c='x' 'y', d=r'a\\b')]",
        [("f", {"año": 2024, "b": [1, 2], "c": "xy", "d": "a\\b"})],
    ),
}


def parse(case: Case, pieces: Sequence[str]) -> ParsedDelta:
    names = ParserNames(case.parser, case.reasoning_parser)
    return parsed(names, pieces, ParserContext(TOOLS, identity="request"))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_inexact_output_is_parsed_as_it_was_meant(case: Case) -> None:
    found = parse(case, [case.text])
    assert [(name, json.loads(arguments)) for name, arguments, _ in found.calls] == list(case.calls)
    assert (found.content, found.reasoning, set(found.degraded)) == (case.content, case.reasoning, case.degraded)
    assert parse(case, list(case.text)) == found
    for cut in range(len(case.text)):
        assert parse(case, [case.text[:cut], case.text[cut:]]) == found


LIMITS = [*range(244, 263), *range(500, 527), *range(1_022, 1_027), *range(65_520, 65_546)]
"""Around the lengths of names, keys, white space and heads at which parsers decide."""
SHAPES = {
    "hermes": '<tool_call>{{"name": "{n}", "arguments": {{"k": 1}}}}</tool_call>',
    "hermes, head": '<tool_call>{{"x": "{n}", "name": "f", "arguments": {{}}}}</tool_call>',
    "llama3_json": '{{"name": "{n}", "parameters": {{}}}}',
    "pythonic": "[{n}(a=1)]",
    "pythonic, key": "[f({n}=1)]",
    "mistral": "[TOOL_CALLS]{n}[ARGS]{{}}",
    "deepseek_v3": "<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>{n}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
    "granite": '<|tool_call|>[{{"name": "{n}", "arguments": {{}}}}]',
    "qwen3_coder": "<function={n}>\n</function>",
    "qwen3_coder, key": "<function=f>\n<parameter={n}>\nx\n</parameter>\n</function>",
    "qwen3_coder, after a value": "<function=f>\n<parameter=a>\nx</parameter>{s}</function>",
    "glm45": "<tool_call>{n}\n</tool_call>",
    "glm45, key": "<tool_call>f\n<arg_key>{n}</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "glm45, held": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</tool_call>{n}",
    "minimax_m2": '<invoke name="{n}">\n</invoke>',
    "minimax_m2, key": '<invoke name="f"><parameter name="{n}">x</parameter></invoke>',
    "harmony": "<|channel|>commentary to=functions.{n}<|message|>{{}}<|call|>",
    "hermes, white space": 'text{s}<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>{s}more',
    "qwen3_coder, white space": "text{s}<tool_call>{s}<function=f>{s}</function>{s}</tool_call>{s}more",
    "llama3_json, white space": '{s}{{"name": "f", "parameters": {{}}}}{s}',
    "pythonic, white space": "{s}[f()]{s}",
    "kimi_k2, white space": "a{s}<|tool_calls_section_begin|>{s}<|tool_call_begin|>f:0<|tool_call_argument_begin|>{{}}",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_split_at_a_limit_parses_the_same(shape: str) -> None:
    parser = shape.split(",", maxsplit=1)[0]
    names = ParserNames(parser, "harmony" if parser == "harmony" else "")
    context = ParserContext((), identity="request")
    lengths = (
        LIMITS if shape in ("hermes", "hermes, head", "hermes, white space") else LIMITS[: LIMITS.index(1_026) + 1]
    )
    for length in lengths:
        text = SHAPES[shape].format(n="n" * length, s=" \n" * (length // 2) + " " * (length % 2))
        whole = parsed(names, [text], context)
        run = text.index("n" * length) if "{n}" in SHAPES[shape] else text.index(" \n")
        ends = [run, run + length]
        cuts = {cut for end in ends for cut in range(end - 14, end + 14) if 0 < cut < len(text)}
        for cut in sorted(cuts):
            assert parsed(names, [text[:cut], text[cut:]], context) == whole, (length, cut)
        assert parsed(names, [text[at : at + 7] for at in range(0, len(text), 7)], context) == whole, length
