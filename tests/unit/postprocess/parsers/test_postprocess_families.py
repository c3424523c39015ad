"""Families of models: their declarations are complete and documented, and what they write is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.families import FAMILIES, Family
from services.postprocess.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.support.data.call_formats import FORMATS
from tests.support.oracles.parsing import MARKUP, RECORDED, TOOLS, parsed

PAGE = (Path(__file__).parents[4] / "docs" / "parsers.md").read_text("utf-8")
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Zürich "🌧️"\n\n<x> {} [] \\ null', "days": 3}),
    ("f", {}),
    ("g", {"city": "plain"}),
]


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS, *REASONING_PARSERS}))
def test_name_of_a_parser_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_declares_what_auto_needs_and_has_corpora(family: Family) -> None:
    assert family.tool or family.reasoning
    only_by_name = family.name == "minimax_append_think"
    by_rule = family.rule is not None or only_by_name
    assert bool(family.hints) == (family.tool is not None and not by_rule)
    assert bool(family.reasoning_hints) == (family.reasoning is not None and not by_rule)
    assert family.tool is None or family.name in FORMATS
    corpora = [names for names in RECORDED if family.name in names]
    assert only_by_name or sum(len(RECORDED[names]) for names in corpora) >= 2
    assert all(MARKUP[names] for names in corpora)


@pytest.mark.parametrize("name", FORMATS)
def test_written_calls_are_parsed_between_texts(name: str) -> None:
    form = FORMATS[name]
    text, context = form.render(CALLS), ParserContext(TOOLS, identity="request")
    harmony = form.parser == "harmony"
    before = "" if harmony or form.parser in ("pythonic", "llama3_json") else "Let me look.\n"
    names = ParserNames(form.parser, "harmony" if harmony else "")
    found = parsed(names, [before + text], context)
    assert [(call, json.loads(arguments)) for call, arguments, _ in found.calls] == CALLS
    assert (found.content, found.degraded) == (before.rstrip(), frozenset())
    assert parsed(names, list(before + text), context) == found


@pytest.mark.parametrize(
    ("parser", "tail", "text", "reasoning", "content"),
    [
        ("gemma4", "", "<|channel>thought\nHm\n<channel|>\nYes.", "Hm", "Yes."),
        ("seed_oss", "", "<seed:think>Hm</seed:think>Yes.", "Hm", "Yes."),
        ("cohere_command3", "<|START_THINKING|>", "Hm<|END_THINKING|>Yes.", "Hm", "Yes."),
        ("granite_thinking", "", "Here's my thought process:\nHm\n\nHere is my response:\nYes.", "Hm", "Yes."),
        ("granite_thinking", "", "Here is my answer.", "", "Here is my answer."),
        ("minimax_append_think", "<think>\n", "Hm</think>Yes.", "", "<think>\nHm</think>Yes."),
        ("minimax_append_think", "", "Yes.", "", "Yes."),
        ("glm45", "<think>", "Hm</think>Yes.", "Hm", "Yes."),
    ],
)
def test_reasoning_of_a_family_is_told_from_content(
    parser: str, tail: str, text: str, reasoning: str, content: str
) -> None:
    context = ParserContext(TOOLS, identity="request", prompt_tail=tail)
    for pieces in ([text], list(text)):
        found = parsed(ParserNames("", parser), pieces, context)
        assert (found.reasoning, found.content) == (reasoning, content)
