"""Forms in which families write values and calls: quotes, line breaks, missing tags, wrappers, other openers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from tests.support.data.call_formats import FORMATS
from tests.support.oracles.parsing import ParsedDelta, parsed, tool

REPAIRED = frozenset({"tool_call_repaired"})
STRING = {"type": "string"}
ASKS = tool("ask", city=STRING, zip=STRING, days={"type": "integer"})
ASKS["function"]["parameters"]["required"] = ["city", "zip"]
CONTEXT = ParserContext((ASKS, tool("g")), identity="request")
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)

KEYS = st.text("abcé_", min_size=1, max_size=4)
TEXTS = st.text("ab é🌧\n\\'\"{}[],:", max_size=8)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-99, 99), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


def one(parser: str, text: str, reasoning: str = "") -> ParsedDelta:
    names = ParserNames(parser, reasoning)
    whole = parsed(names, [text], CONTEXT)
    assert parsed(names, list(text), CONTEXT) == whole
    return whole


def arguments_of(found: ParsedDelta) -> list[Any]:
    return [json.loads(arguments) for _, arguments, _ in found.calls]


def as_python(value: Any) -> str:
    """A value as Python writes it, with the quote that needs no escape sequence."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {as_python(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(as_python, value)) + "]" if isinstance(value, list) else repr(value)


@few
@given(st.dictionaries(KEYS, VALUES, max_size=3), st.sampled_from(["json", "escaped", "python"]))
def test_gemma_writes_containers_as_json_and_python_do(given_arguments: dict[str, Any], notation: str) -> None:
    written = (
        as_python(given_arguments)
        if notation == "python"
        else json.dumps(given_arguments, ensure_ascii=notation == "escaped")
    )
    found = one("gemma4", f"<|tool_call>call:g{written}<tool_call|>")
    assert (arguments_of(found), found.content, found.degraded) == ([given_arguments], "", frozenset())


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("""{ids:['x1',"y, z"],o:{"k": 1}}""", {"ids": ["x1", "y, z"], "o": {"k": 1}}),
        ('{"s": "v"}', {"s": "v"}),
        ('{s:"a, b} c"}', {"s": "a, b} c"}),
        ("{s:'it's fine'}", {"s": "it's fine"}),
        ("{zip:90210,days:3,city:null}", {"zip": "90210", "days": 3, "city": None}),
    ],
)
def test_values_of_gemma_have_any_quotes_and_the_types_of_the_schema(written: str, arguments: dict[str, Any]) -> None:
    for opener in ("call:", ":"):
        found = one("gemma4", f"<|tool_call>{opener}ask{written}<tool_call|>")
        assert (arguments_of(found), found.degraded) == ([arguments], frozenset())


def test_quote_of_gemma_that_never_ends_takes_nothing_of_the_next_call() -> None:
    found = one("gemma4", "<|tool_call>call:g{s:'tis}<tool_call|><|tool_call>call:ask{days:1}<tool_call|>")
    assert [name for name, _, _ in found.calls] == ["g", "ask"]
    assert found.degraded == {"tool_call_malformed"}


DSML = ("deepseek_v32", "deepseek_v41")
UNTYPED = [name for name, form in FORMATS.items() if name in DSML or (form.untyped and name != "gemma4")]


@pytest.mark.parametrize("name", [name for name in UNTYPED if not name.startswith("glm")])
def test_line_breaks_at_the_ends_of_a_value_stay(name: str) -> None:
    @few
    @given(st.text("ab \n\t", max_size=6))
    def check(value: str) -> None:
        found = one(FORMATS[name].parser, FORMATS[name].render([("ask", {"city": value})]))
        assert (arguments_of(found), found.degraded) == ([{"city": value}], frozenset())

    check()


@pytest.mark.parametrize("name", [name for name in UNTYPED if name != "minimax_m3"])
@pytest.mark.parametrize("value", ["Q", "Q y", "[1]"])
def test_value_without_its_end_tag_ends_where_a_required_argument_begins(name: str, value: str) -> None:
    text = FORMATS[name].render([("ask", {"city": value, "zip": "1"})])
    end = text.index(value) + len(value)
    found = one(FORMATS[name].parser, text[:end] + text[end:][_size_of_tag(text[end:]) :].lstrip("\n"))
    assert (arguments_of(found), found.degraded) == ([{"city": value, "zip": "1"}], REPAIRED)


def _size_of_tag(text: str) -> int:
    """The size of the end tag at the beginning of a text, with the line break before it."""
    close = "<|sep|>" if "<|close|>" in text[:12] else ">"
    return text.index(close) + len(close)


def test_tag_of_an_argument_that_is_not_required_is_text_in_a_line_and_marked() -> None:
    text = "<function=ask>\n<parameter=city>\nwrite <parameter=days> there\n</parameter>\n</function>"
    found = one("qwen3_coder", text)
    assert (arguments_of(found), found.degraded) == ([{"city": "write <parameter=days> there"}], REPAIRED)


@pytest.mark.parametrize("value", [{"city": "x", "zip": "1"}, {}, {"city": 'é"\n'}])
@pytest.mark.parametrize("is_text", ["true", "false"])
def test_object_of_all_arguments_is_unwrapped(value: dict[str, Any], is_text: str) -> None:
    parameter = f'<｜DSML｜parameter name="arguments" string="{is_text}">{json.dumps(value)}</｜DSML｜parameter>'
    found = one("deepseek_v32", f'<｜DSML｜invoke name="ask">{parameter}</｜DSML｜invoke>')
    assert (arguments_of(found), found.degraded) == ([value], REPAIRED)
    more = '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>'
    found = one("deepseek_v32", f'<｜DSML｜invoke name="ask">{parameter}{more}</｜DSML｜invoke>')
    assert arguments_of(found) == [{**value, "days": 3}]


def test_wrapper_that_is_no_object_is_an_argument() -> None:
    parameter = '<｜DSML｜parameter name="arguments" string="false">[1]</｜DSML｜parameter>'
    found = one("deepseek_v32", f'<｜DSML｜invoke name="ask">{parameter}</｜DSML｜invoke>')
    assert (arguments_of(found), found.degraded) == ([{"arguments": [1]}], frozenset())


def test_calls_of_deepseek_v41_have_a_space_in_their_tags() -> None:
    found = one(
        "deepseek_v41",
        "Look.\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="space::ask">\n<｜DSML｜ parameter name="city" string="true">x</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
    )
    assert [(name, json.loads(arguments)) for name, arguments, _ in found.calls] == [("space::ask", {"city": "x"})]
    assert (found.content, found.degraded) == ("Look.", frozenset())


@pytest.mark.parametrize("text", ['{"city": "x", "a": {"b": [1]}}', "{}", '{"city": "<|close|>"}'])
def test_arguments_of_kimi_k3_may_be_a_json_object(text: str) -> None:
    call = f'<|open|>call tool="ask" index="1"<|sep|>{text}<|close|>call<|sep|>'
    found = one("kimi_k3", f"<|open|>tools<|sep|>{call}{call.replace('ask', 'g')}<|close|>tools<|sep|>")
    assert (arguments_of(found), found.content, found.degraded) == ([json.loads(text)] * 2, "", frozenset())
    cut = one("kimi_k3", call.removesuffix("<|close|>call<|sep|>"))
    assert (arguments_of(cut), cut.degraded) == ([json.loads(text)], frozenset({"tool_call_incomplete"}))


@pytest.mark.parametrize("spaces", ["", " ", "\n  "])
@pytest.mark.parametrize("text", ["{|", "{w1 g(", '{"city": x}'])
def test_malformed_object_of_kimi_k3_is_kept_without_the_spaces_before_it(spaces: str, text: str) -> None:
    found = one("kimi_k3", f'<|open|>call tool="ask" index="1"<|sep|>{spaces}{text}<|close|>call<|sep|>')
    assert ([arguments for _, arguments, _ in found.calls], found.content) == ([text], "")
    assert "tool_call_malformed" in found.degraded


def test_calls_of_granite_begin_with_either_marker() -> None:
    for opener in ("<|tool_call|>", "<tool_call>"):
        found = one("granite", f'{opener}[{{"name": "g", "arguments": {{"a": 1}}}}]')
        assert (arguments_of(found), found.content, found.degraded) == ([{"a": 1}], "", frozenset())


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<think>\nHm\n</think>\n<answer>\nYes.\n</answer>", "Yes.", 0),
        ("<answer>Yes <answer>x</answer> there.</answer>\n", "Yes <answer>x</answer> there.", 0),
        ("Yes </answer>", "Yes </answer>", 0),
        ('<answer>\nLook.\n</answer>\n<tool_calls>[{"name": "g", "arguments": {}}]</tool_calls>', "Look.", 1),
        ('<answer>\n<tool_calls>[{"name": "g", "arguments": {}}]</tool_calls>\n</answer>', "", 1),
    ],
)
def test_tags_around_an_answer_of_hunyuan_are_omitted(text: str, content: str, calls: int) -> None:
    found = one("hunyuan_a13b", text, "hunyuan_a13b")
    assert (found.content, len(found.calls), found.degraded) == (content, calls, frozenset())
