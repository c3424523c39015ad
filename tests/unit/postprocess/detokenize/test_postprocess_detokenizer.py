"""Incremental text equals the library's text, and no character is ever given out in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.postprocess.detokenize.detokenizer import LibraryDetokenizer
from services.postprocess.detokenize.stops import StopScanner, StopStrings, compile_stops
from services.postprocess.detokenize.vocabulary import Vocabulary
from tests.support.data.vocabularies import (
    ALL,
    TABLES,
    by_library,
    byte_fallback,
    byte_level,
    metaspace,
    tekken,
    word_piece,
)
from tests.support.oracles.errors import raises_error

TEXT = "Hello world, ça va? 👩‍👩‍👧 日本語 é\n"


def pieces(vocabulary: Vocabulary, ids: Sequence[int], skip: bool = True, tail: Sequence[int] = ()) -> list[str]:
    detokenizer = vocabulary.detokenizer(skip, tail)
    return [*map(detokenizer.step, ids), detokenizer.flush()]


def ids_of(vocabulary: Vocabulary, highest: int = 1500) -> st.SearchStrategy[list[int]]:
    """Mostly low ids: there are the specials and the single bytes."""
    low = st.integers(0, min(highest, vocabulary.size) - 1)
    return st.lists(st.one_of(low, st.integers(0, vocabulary.size - 1)), max_size=40)


@pytest.mark.parametrize("name", TABLES)
def test_a_vocabulary_with_bytes_is_a_table(name: str) -> None:
    assert ALL[name]().vocabulary.exact


@pytest.mark.parametrize("make", [word_piece, by_library])
def test_an_unusual_decoder_goes_through_the_library(make: type) -> None:
    assert not make().vocabulary.exact


@pytest.mark.parametrize("make", [tekken, byte_level])
@settings(deadline=None)
@given(data=st.data())
def test_byte_level_text_is_the_library_s_for_any_ids(make: type, data: st.DataObject) -> None:
    known = make()
    ids, skip = data.draw(ids_of(known.vocabulary)), data.draw(st.booleans())
    assert "".join(pieces(known.vocabulary, ids, skip)) == known.decode(ids, skip)


@settings(deadline=None)
@given(ids=ids_of(metaspace().vocabulary), skip=st.booleans())
def test_metaspace_text_is_the_library_s_for_any_ids(ids: list[int], skip: bool) -> None:
    assert "".join(pieces(metaspace().vocabulary, ids, skip)) == metaspace().decode(ids, skip)


@settings(deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from(range(257, 273)), st.sampled_from("é👩語ß€"), st.just("")), max_size=20),
    skip=st.booleans(),
)
def test_byte_fallback_text_is_the_library_s_for_complete_characters(parts: list[int | str], skip: bool) -> None:
    known = byte_fallback()
    ids = [
        token
        for part in parts
        for token in ([part] if isinstance(part, int) else [1 + byte for byte in part.encode()] or known.specials)
    ]
    assert "".join(pieces(known.vocabulary, ids, skip)) == known.decode(ids, skip)


def test_byte_fallback_replaces_every_byte_of_a_broken_character() -> None:
    known = byte_fallback()
    broken = [1 + 0xE2, 1 + 0x82, 258]
    assert pieces(known.vocabulary, broken) == ["", "", "\ufffd\ufffd Hello", ""]
    assert known.decode(broken, True) == "\ufffd\ufffd Hello"


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("word_piece", "metaspace")])
def test_a_character_of_many_tokens_comes_out_whole(name: str) -> None:
    known = ALL[name]()
    ids = known.encode(TEXT)
    texts = pieces(known.vocabulary, ids)
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) == known.decode(ids, True)
    assert sum(bool(text) for text in texts) < len(texts) - 4, "some tokens were incomplete"


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)
@given(data=st.data())
def test_text_only_grows_and_is_held_back_by_a_character_at_most(name: str, data: st.DataObject) -> None:
    known = TABLES[name]() if name in TABLES else ALL[name]()
    ids = data.draw(ids_of(known.vocabulary))
    detokenizer = known.vocabulary.detokenizer(True)
    text = "".join(map(detokenizer.step, ids))
    rest = detokenizer.flush()
    assert len(rest) <= 3 or not known.vocabulary.exact
    assert detokenizer.flush() == ""
    assert text + rest == "".join(pieces(known.vocabulary, ids))


def test_a_tail_decides_about_the_first_space() -> None:
    vocabulary, (bos, _) = byte_fallback().vocabulary, byte_fallback().specials
    hello = 258
    assert "".join(pieces(vocabulary, [hello, hello])) == "Hello Hello"
    assert "".join(pieces(vocabulary, [hello, hello], tail=[hello])) == " Hello Hello"
    assert "".join(pieces(vocabulary, [hello, hello], tail=[bos])) == "Hello Hello"
    assert "".join(pieces(vocabulary, [hello], skip=False, tail=[bos])) == " Hello"
    assert "".join(pieces(vocabulary, [bos, hello])) == "Hello"


def test_a_tail_decides_about_the_first_space_in_the_library_too() -> None:
    vocabulary = by_library().vocabulary
    assert "".join(pieces(vocabulary, [258, 259])) == "Hello world"
    assert "".join(pieces(vocabulary, [258, 259], tail=[258])) == " Hello world"


def test_a_character_that_the_prompt_began_is_completed() -> None:
    vocabulary = tekken().vocabulary
    first, second, third = (1000 + byte for byte in "€".encode())
    assert pieces(vocabulary, [second, third], tail=[first]) == ["", "€", ""]


def test_a_special_id_ends_a_character_in_tekken_as_its_library_does() -> None:
    known = tekken()
    first, second, third = (1000 + byte for byte in "€".encode())
    ids = [first, 2, second, third]
    assert pieces(known.vocabulary, ids) == ["", "\ufffd", "\ufffd", "\ufffd", ""]
    assert known.decode(ids, True) == "\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("name", ALL)
def test_an_id_outside_the_vocabulary_is_an_error(name: str) -> None:
    vocabulary = ALL[name]().vocabulary
    detokenizer = vocabulary.detokenizer(True)
    with raises_error(
        match=f"outside the vocabulary; use ids below {vocabulary.size}", kind=ErrorKind.INVALID_ARGUMENT
    ):
        detokenizer.step(vocabulary.size)
    with pytest.raises(SluiceError):
        vocabulary.detokenizer(True, [2**32 - 1])


def test_the_library_never_holds_back_without_end() -> None:
    detokenizer = by_library().vocabulary.detokenizer(True)
    assert isinstance(detokenizer, LibraryDetokenizer)
    lone_byte = 1 + 0xFF
    texts = [detokenizer.step(lone_byte) for _ in range(3 * LibraryDetokenizer.MAX_HELD)]
    assert "".join(texts) == "\ufffd" * len(texts)
    assert detokenizer.step(258).endswith("Hello")


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


@pytest.mark.parametrize(
    ("stops", "sentence"),
    [([""], "is empty"), (["a"] * 3, "too many; send at most 2"), (["abcd", "e"], "send at most 4")],
)
def test_bad_stop_strings_are_refused(stops: list[str], sentence: str) -> None:
    with raises_error(match=sentence, kind=ErrorKind.INVALID_ARGUMENT, param="stop"):
        compile_stops(stops, max_strings=2, max_chars=4)
