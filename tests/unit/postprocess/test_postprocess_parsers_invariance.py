"""However an answer is cut, every parser says the same about it, and loses nothing."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.postprocess.parsers.registry import ParserNames
from tests.support.parsing import COMMON, MARKUP, RECORDED, WORDS, parsed, pieces_of

CASES = int(os.environ.get("SLUICE_TEST_PARSER_CASES", "1000"))
"""Cases of each parser; 100,000 take about an hour."""

places = st.lists(st.integers(0, 4_000), max_size=12)
lots = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


@st.composite
def answers(draw: st.DrawFn, names: tuple[str, str]) -> str:
    """A recorded answer with something cut out or put in, or fragments of the format in any order."""
    fragments = st.sampled_from([*MARKUP[names], *MARKUP[names], *COMMON, *WORDS])
    if draw(st.booleans()):
        return "".join(draw(st.lists(fragments, max_size=14)))
    text = draw(st.sampled_from(RECORDED[names]))
    start, size = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
    return text[:start] + draw(st.one_of(st.just(""), fragments)) + text[start + size * draw(st.booleans()) :]


@pytest.mark.parametrize("names", MARKUP, ids="-".join)
def test_any_cut_of_any_answer_says_the_same(names: tuple[str, str]) -> None:
    parsers = ParserNames(*names)

    cases = 0

    @lots
    @given(answers(names), places)
    def check(text: str, cuts: list[int]) -> None:
        nonlocal cases
        cases += 1
        whole = parsed(parsers, [text])
        assert parsed(parsers, pieces_of(text, cuts)) == whole
        assert parsed(parsers, list(text)) == whole

    check()
    assert cases >= CASES, "the budget was spent"


@pytest.mark.parametrize("names", RECORDED, ids="-".join)
def test_every_place_of_a_recorded_answer_can_be_cut(names: tuple[str, str]) -> None:
    for text in RECORDED[names]:
        whole = parsed(ParserNames(*names), [text])
        for at in range(len(text)):
            assert parsed(ParserNames(*names), [text[:at], text[at:]]) == whole
        for size in range(1, 8):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert parsed(ParserNames(*names), pieces) == whole


@pytest.mark.parametrize("names", [names for names in MARKUP if names[0] != "harmony"], ids="-".join)
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
