"""Where a thought begins and ends: closing tags alone, constrained output, and thoughts of all families."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.packages.model_files import THOUGHT_TAGS
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.families.hunyuan_a13b import HunyuanThinkParser
from services.postprocess.parsers.families.kimi_k3 import KimiK3ThinkParser
from services.postprocess.parsers.reasoning.think import MAX_UNDECIDED, ThinkParser
from services.postprocess.parsers.registry import REASONING_PARSERS, build
from tests.support.oracles.parsing import TOOLS, ParsedDelta, parsed

TAGS = {
    name: (parser.start, parser.end) for name, parser in REASONING_PARSERS.items() if issubclass(parser, ThinkParser)
}
TAGS |= {
    name: ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    for name, parser in REASONING_PARSERS.items()
    if parser is KimiK3ThinkParser
}
TAGS |= {name: ("<think>", "</think>") for name, parser in REASONING_PARSERS.items() if parser is HunyuanThinkParser}
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


def one(name: str, text: str, tail: str = "", guided: bool = False) -> ParsedDelta:
    context = ParserContext(TOOLS, identity="request", prompt_tail=tail, guided=guided)
    whole = parsed(ParserNames("", name), [text], context)
    assert parsed(ParserNames("", name), list(text), context) == whole
    assert parsed(ParserNames("", name), list(text), context, plain=True) == whole
    return whole


def test_tags_of_every_parser_of_tags_are_tried() -> None:
    assert set(REASONING_PARSERS) - set(TAGS) == {"harmony", "minimax_append_think"}


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("after", ["", "\n\n"])
def test_closing_tag_at_the_beginning_is_not_shown(name: str, after: str) -> None:
    opening, closing = TAGS[name]
    for tail in ("", "assistant\n", f"assistant\n{opening}\n", f"{opening}\n\n{closing}\n\n"):
        for before in ("", "\n"):
            found = one(name, f"{before}{closing}{after}Done", tail)
            assert (found.content, found.reasoning, found.degraded) == ("Done", "", frozenset())
    assert one(name, f"Done {closing}").content == f"Done {closing}" or name == "deepseek_r1"


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("opened", [True, False])
def test_constrained_output_is_content_unless_a_tag_closes_a_thought(name: str, opened: bool) -> None:
    opening, closing = TAGS[name]
    tail = f"assistant\n{opening}\n" if opened else ""

    @few
    @given(st.text('pq1 \n{["<', min_size=1, max_size=12))
    def check(text: str) -> None:
        found = one(name, text, tail, guided=True)
        assert (found.content, found.reasoning) == (text, "")

    check()
    if opened or name == "deepseek_r1":
        found = one(name, f"I think.{closing}\np", tail, guided=True)
        assert (found.content, found.reasoning) == ("p", "I think.")


@pytest.mark.parametrize("name", ["think", "deepseek_r1"])
def test_constrained_output_without_end_is_a_thought_that_is_not_held_for_ever(name: str) -> None:
    context = ParserContext(prompt_tail="<think>\n", guided=True)
    parser = build(ParserNames("", name), context)
    text = "many words " * (2 * MAX_UNDECIDED // 11)
    found = [event for piece in text.split(" ") for event in parser.feed(piece + " ")]
    assert parser.held_size < 100
    assert {type(event).__name__ for event in found} == {"Reasoning"}
    assert not parser.retracted


@pytest.mark.parametrize(("text", "reasoning"), [("pq", False), ("pq</think>1", True)])
def test_tokens_of_constrained_output_count_as_reasoning_if_it_was(text: str, reasoning: bool) -> None:
    parser = build(ParserNames("", "think"), ParserContext(prompt_tail="<think>\n", guided=True))
    counted = 0
    for character in text:
        parser.feed(character)
        counted += parser.reasoning
    parser.finish()
    assert (counted > 0, parser.retracted) == (True, not reasoning)


def test_tags_that_preprocess_finds_are_those_of_the_parsers() -> None:
    assert set(TAGS.values()) == set(THOUGHT_TAGS)


@pytest.mark.parametrize("name", TAGS)
def test_thought_that_the_prompt_leaves_open_continues(name: str) -> None:
    opening, closing = TAGS[name]
    for tail in ("and I see", f"{opening}\nI see"):
        context = ParserContext(TOOLS, identity="request", prompt_tail=tail, thinking=True)
        for pieces in ([f" more{closing}yes"], list(f" more{closing}yes")):
            found = parsed(ParserNames("", name), pieces, context)
            assert (found.reasoning, found.content) == (" more", "yes")


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("thinks", [True, False])
def test_forced_call_of_a_model_that_thinks_is_a_call(name: str, thinks: bool) -> None:
    opening, closing = TAGS[name]
    call = '{"name": "f", "parameters": {"a": 2}}'
    context = ParserContext(TOOLS, True, guided=True, prompt_tail=f"{opening}\n", identity="request")
    text = f"Fine.{closing}\n{call}" if thinks else call
    for pieces in ([text], list(text)):
        found = parsed(ParserNames("llama3_json", name), pieces, context)
        assert [called[:2] for called in found.calls] == [("f", '{"a": 2}')]
        assert (found.reasoning, found.content, found.degraded) == ("Fine." if thinks else "", "", frozenset())


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ('{"name": "f", "parameters": {}}', ""),
        (' \n{"name": "f", "parameters": {}}', ""),
        (
            "<|channel|>analysis<|message|>Fine.<|end|><|start|>assistant<|channel|>final<|message|>"
            '{"name": "f", "parameters": {}}',
            "Fine.",
        ),
    ],
)
def test_forced_call_of_gpt_oss_is_a_call_with_and_without_channels(text: str, reasoning: str) -> None:
    context = ParserContext(TOOLS, True, guided=True, prompt_tail="<|start|>assistant", identity="request")
    for pieces in ([text], list(text)):
        found = parsed(ParserNames("llama3_json", "harmony"), pieces, context)
        assert [called[:2] for called in found.calls] == [("f", "{}")]
        assert (found.reasoning, found.content, found.degraded) == (reasoning, "", frozenset())
