"""However an answer is cut, every parser says the same about it, and loses nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.families.think import AppendedThinkParser
from services.postprocess.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.support.data import parser_cases
from tests.support.data.parser_cases import label
from tests.support.oracles.parsing import COMMON, MARKUP, RECORDED, parsed

CASES = 300
"""Cases of each parser; `make test-parsers` runs 100,000."""

lots = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


def test_every_built_in_parser_has_answers_and_fragments() -> None:
    tools = {TOOL_PARSERS[tool] for tool, _ in MARKUP if tool}
    reasonings = {REASONING_PARSERS[reasoning] for _, reasoning in MARKUP if reasoning}
    assert tools == set(TOOL_PARSERS.values())
    assert reasonings == set(REASONING_PARSERS.values()) - {AppendedThinkParser}, "which returns all text"
    assert set(RECORDED) == set(MARKUP)


@pytest.mark.parametrize("names", MARKUP, ids=label)
def test_any_split_of_any_answer_parses_the_same(names: tuple[str, str]) -> None:
    cases = 0

    @lots
    @given(st.randoms(use_true_random=False))
    def check(draw: random.Random) -> None:
        nonlocal cases
        cases += 1
        parser_cases.check(names, *parser_cases.case(names, draw))

    check()
    assert cases >= CASES, "the budget was spent"


@pytest.mark.parametrize("names", RECORDED, ids=label)
def test_every_place_of_a_recorded_answer_can_be_cut(names: tuple[str, str]) -> None:
    for text in RECORDED[names]:
        whole = parsed(ParserNames(*names), [text])
        for at in range(len(text)):
            assert parsed(ParserNames(*names), [text[:at], text[at:]]) == whole
        for size in range(1, 8):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert parsed(ParserNames(*names), pieces) == whole


@pytest.mark.parametrize("names", [names for names in MARKUP if names[0] != "harmony"], ids=label)
def test_no_word_is_lost(names: tuple[str, str]) -> None:
    """Words outside markup come out somewhere: as content, reasoning, a name or arguments."""
    markup = [part for part in (*MARKUP[names], *COMMON, "\n", " ", ",") if part not in ("function",)]

    @settings(lots, max_examples=max(CASES // 4, 1))
    @given(st.lists(st.sampled_from(markup), max_size=10))
    def check(parts: list[str]) -> None:
        text = "".join(f"{part}w{place}w" for place, part in enumerate(parts))
        heard = parsed(ParserNames(*names), [text])
        everything = " ".join([heard.content, heard.reasoning, *(part for call in heard.calls for part in call)])
        assert [place for place in range(len(parts)) if f"w{place}w" not in everything] == []

    check()
