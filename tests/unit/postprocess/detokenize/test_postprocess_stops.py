"""Stop strings against a search that is too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ErrorKind
from services.postprocess.detokenize.stops import StopScanner, StopStrings, compile_stops
from tests.support.oracles.errors import raises_error

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=6)
PARTS = st.lists(st.text("abcd", max_size=5), max_size=12)


def first_hit(text: str, stops: list[str], counted_from: int = 0) -> tuple[str, int] | None:
    """The stop string that is complete first, the longest of several, and the place after it."""
    for end in range(counted_from + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of a text begin a stop string without completing it."""
    lengths = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return max(lengths, default=0)


@settings(deadline=None)
@given(stops=STOPS, parts=PARTS, include=st.booleans())
def test_the_stop_that_is_complete_first_ends_the_text(stops: list[str], parts: list[str], include: bool) -> None:
    scanner = StopScanner(StopStrings(stops), include)
    given_out = ""
    for part in parts:
        given_out += scanner.scan(part, counts=True)
        if scanner.hit:
            break
    expected = first_hit("".join(parts), stops)
    if expected is None:
        assert scanner.hit == ""
        assert given_out + scanner.flush() == "".join(parts)
    else:
        hit, end = expected
        assert scanner.hit == hit
        assert given_out == "".join(parts)[: end if include else end - len(hit)]


@settings(deadline=None)
@given(stops=STOPS, parts=PARTS)
def test_nothing_is_held_back_that_is_certain(stops: list[str], parts: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops), include=False)
    text = given_out = ""
    for part in parts:
        text += part
        given_out += scanner.scan(part, counts=True)
        if scanner.hit:
            break
        assert given_out == text[: len(text) - longest_beginning(text, stops)]


@settings(deadline=None)
@given(stops=STOPS, early=PARTS, late=PARTS)
def test_a_stop_that_is_complete_too_early_is_text(stops: list[str], early: list[str], late: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops), include=False)
    given_out = "".join(scanner.scan(part, counts=False) for part in early)
    start = sum(map(len, early))
    assert given_out == "".join(early)[: start - longest_beginning("".join(early), stops)]
    for part in late:
        given_out += scanner.scan(part, counts=True)
        if scanner.hit:
            break
    text = "".join(early + late)
    expected = first_hit(text, stops, counted_from=start)
    assert scanner.hit == (expected[0] if expected else "")
    assert given_out + scanner.flush() == (text[: expected[1] - len(expected[0])] if expected else text)


def test_a_thousand_stop_strings_are_one_look_up() -> None:
    stops = compile_stops([f"<stop {number}>" for number in range(1000)], 1000, 20_000)
    assert stops is not None
    scanner = StopScanner(stops, include=False)
    assert scanner.scan("x < y, <stop", counts=True) == "x < y, "
    assert scanner.scan(" 1000x <stop 99", counts=True) == "<stop 1000x "
    assert scanner.scan("9> z", counts=True) == ""
    assert scanner.hit == "<stop 999>"


def test_short_stop_strings_are_shared_and_long_ones_are_not() -> None:
    assert compile_stops(("a", "b"), 9, 999) is compile_stops(["a", "b"], 9, 999)
    assert compile_stops(("a" * 300,), 9, 999) is not compile_stops(("a" * 300,), 9, 999)
    assert compile_stops((), 9, 999) is None


@pytest.mark.parametrize(
    ("stops", "sentence"),
    [([""], "is empty"), (["a"] * 3, "too many; send at most 2"), (["abcd", "e"], "send at most 4")],
)
def test_bad_stop_strings_are_refused(stops: list[str], sentence: str) -> None:
    with raises_error(match=sentence, kind=ErrorKind.INVALID_ARGUMENT, param="stop"):
        compile_stops(stops, max_strings=2, max_chars=4)
