"""Names of calls: one rule for all families, and damaged calls that take nothing of the next one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls.call_names import MAX_NAME, Calls
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.registry import TOOL_PARSERS, build
from tests.support.data import parser_cases
from tests.support.data.call_formats import FORMATS
from tests.support.data.parser_cases import label
from tests.support.oracles.parsing import MARKUP, TOOLS, ParsedDelta, parsed, tool

MALFORMED = frozenset({"tool_call_malformed"})
PAIRS = [(names, form) for names in MARKUP for form in parser_cases.formats_of(names)]
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


def one(parser: str, text: str, context: ParserContext | None = None) -> ParsedDelta:
    names = ParserNames(parser, "harmony" if parser == "harmony" else "")
    whole = parsed(names, [text], context)
    assert parsed(names, list(text), context) == whole
    return whole


def calls_of(found: ParsedDelta) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments, _ in found.calls]


@pytest.mark.parametrize(("names", "form"), PAIRS, ids=[f"{label(names)}-{form}" for names, form in PAIRS])
def test_whole_call_after_a_damaged_one_is_a_call(names: tuple[str, str], form: str) -> None:
    @few
    @given(st.randoms(use_true_random=False))
    def check(draw: random.Random) -> None:
        text = parser_cases.damaged(names, form, draw)
        parser_cases.check(names, text, [draw.randint(0, len(text)) for _ in range(4)])
        parser_cases.check_recovered(names, text)

    check()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["(look up)", "Überblick", "a/b", "a" * (MAX_NAME + 1), "a(b)", "a\u202eb"])
def test_name_that_no_tool_has_is_plain_or_no_name(form: str, name: str) -> None:
    text = FORMATS[form].render([(name, {"city": "x"})])
    found = one(FORMATS[form].parser, text)
    name = name.split()[0] if form == "harmony" else name  # a recipient has no white space
    assert (found.calls, name in found.content + found.reasoning) == ((), True)


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in ("harmony", "pythonic")])
@pytest.mark.parametrize("name", ["Überblick", "server/tool", "a.b:c-d"])
def test_name_of_a_tool_of_the_request_is_one(form: str, name: str) -> None:
    text = FORMATS[form].render([(name, {"city": "x"})])
    found = one(FORMATS[form].parser, text, ParserContext((tool(name, city={"type": "string"}),)))
    assert (calls_of(found), found.degraded) == ([(name, {"city": "x"})], frozenset())


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
def test_marker_of_the_family_is_in_no_name_not_even_of_a_tool(parser: str) -> None:
    family = TOOL_PARSERS[parser]
    starts = family.starts if issubclass(family, CallParser) else ()
    for marker in {*family.markers, *starts}:
        calls = Calls(ParserContext((tool(f"a{marker}b"),)), markers={marker})
        assert not calls.is_name(f"a{marker}b")
        assert calls.is_name("ab")


@pytest.mark.parametrize(
    ("parser", "text", "calls", "content"),
    [
        (
            "gemma4",
            '<|tool_call>call:look(q="x")<tool_call|><|tool_call>call:g{n:1}<tool_call|>',
            [("g", {"n": 1})],
            '<|tool_call>call:look(q="x")<tool_call|>',
        ),
        (
            "gemma4",
            "<|tool_call>call:look then more<tool_call|> and {x}",
            [],
            "<|tool_call>call:look then more<tool_call|> and {x}",
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.a:0<|tool_call_begin|>functions.b:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [("b", {})],
            "<|tool_call_begin|>functions.a:0",
        ),
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>a<｜tool▁call▁begin｜>b<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            [("b", {})],
            "<｜tool▁call▁begin｜>a",
        ),
        (
            "minimax_m3",
            ']<]minimax[>[<invoke name="a]<]minimax[>[<invoke name="b">]<]minimax[>[</invoke>',
            [("b", {})],
            ']<]minimax[>[<invoke name="a',
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.a<|channel|>commentary to=functions.b<|message|>{}<|call|>",
            [("b", {})],
            "<|channel|>commentary to=functions.a",
        ),
        (
            "hermes",
            '<tool_call>{"name": "a<tool_call>{"name": "b", "arguments": {}}</tool_call>',
            [("b", {})],
            '<tool_call>{"name": "a',
        ),
    ],
)
def test_head_that_contains_another_call_is_text(
    parser: str, text: str, calls: list[tuple[str, Any]], content: str
) -> None:
    found = one(parser, text)
    assert (calls_of(found), found.content, found.degraded) == (calls, content, MALFORMED)


def test_prose_that_begins_like_a_name_is_held_for_the_length_of_a_name() -> None:
    parser = build(ParserNames("hermes", ""), ParserContext(TOOLS))
    most = 0
    for character in '<tool_call>{"name": "x and so on ' + "and so on " * 200:
        parser.feed(character)
        most = max(most, parser.held_size)
    assert most < 2 * MAX_NAME


@pytest.mark.parametrize(
    ("channel", "recipient", "kind"),
    [
        ("commentary", "browser.search code", "content"),
        ("analysis", "python code", "reasoning"),
        ("commentary", "container.exec", "content"),
    ],
)
@pytest.mark.parametrize("offered", [True, False])
def test_tool_of_gpt_oss_that_was_not_offered_is_text_and_marked(
    channel: str, recipient: str, kind: str, offered: bool
) -> None:
    text = f"<|channel|>{channel} to={recipient}<|message|>print(1)<|call|>"
    names = ParserNames("harmony" if offered else "", "harmony")
    found = parsed(names, list(text), ParserContext(TOOLS if offered else ()))
    assert (getattr(found, kind), found.calls, found.degraded) == ("print(1)", (), MALFORMED)


def test_tool_of_the_request_is_called_without_its_namespace() -> None:
    text = "<|channel|>commentary to=get_weather <|constrain|>json<|message|>{}<|call|>"
    assert calls_of(one("harmony", text)) == [("get_weather", {})]
