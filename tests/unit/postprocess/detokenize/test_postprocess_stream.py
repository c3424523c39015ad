"""One stream: any split gives the same text and the same end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import SluiceError
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.vocabulary import Vocabulary
from tests.support.data.vocabularies import ALL, byte_level, tekken

TEXT = "The rain 😀 falls.\nUser: 你好世界, softly. </end> quick brown fox"
EOS, UNKNOWN = 2, 2**31
OPTIONS = StreamOptions("tekken", eos_token_ids=frozenset([EOS]))


def start(options: StreamOptions = OPTIONS, vocabulary: Vocabulary | None = None) -> Stream:
    return Stream(options, vocabulary or tekken().vocabulary, Limits())


def ids(text: str) -> list[int]:
    return tekken().encode(text)


def fed_in(stream: Stream, tokens: list[int], cuts: list[int], reason: FinishReason) -> tuple[str, Finish]:
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    text = "".join(stream.feed(tokens[a:b]) for a, b in itertools.pairwise(edges))
    text += stream.end(reason)
    assert stream.finish is not None
    return text, stream.finish


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same(name: str, data: st.DataObject) -> None:
    known = ALL[name]()
    low = st.integers(0, min(1400, known.vocabulary.size) - 1)
    chosen = st.one_of(st.sampled_from(known.encode(TEXT) or [0]), low)
    tokens = data.draw(st.lists(chosen, max_size=40))
    whole = known.decode(tokens, True)
    spots = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 6))
    stops = [whole[at : at + size] for at, size in data.draw(st.lists(spots, max_size=3))]
    options = StreamOptions(
        name,
        skip_special_tokens=data.draw(st.booleans()),
        stop=tuple(filter(None, stops)),
        include_stop_string=data.draw(st.booleans()),
        stop_token_ids=frozenset(data.draw(st.lists(low, max_size=2))),
        eos_token_ids=frozenset(known.specials[-1:]),
        ignore_eos=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 12)),
        prompt_tail=tuple(data.draw(st.lists(low, max_size=3))),
    )
    reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    at_once = fed_in(start(options, known.vocabulary), tokens, [], reason)
    cuts = data.draw(st.lists(st.integers(0, 50), max_size=10))
    assert fed_in(start(options, known.vocabulary), tokens, cuts, reason) == at_once
    one_by_one = list(range(len(tokens)))
    assert fed_in(start(options, known.vocabulary), tokens, one_by_one, reason) == at_once


def test_text_is_what_was_encoded() -> None:
    tokens = ids(TEXT)
    text, finish = fed_in(start(), tokens, [], FinishReason.UNSPECIFIED)
    assert text == TEXT
    assert finish == Finish(FinishReason.LENGTH, len(tokens))


def test_the_end_of_sequence_ends_a_stream_and_has_no_text() -> None:
    stream = start(replace(OPTIONS, skip_special_tokens=False))
    assert stream.feed([*ids("Hi there"), EOS, *ids(" and more")]) == "Hi there"
    assert stream.finish == Finish(FinishReason.STOP, len(ids("Hi there")) + 1, stop_token_id=EOS)
    assert stream.feed(ids("more")) == ""
    assert stream.feed_one(1500) == ""
    assert stream.end(FinishReason.LENGTH) == ""
    assert stream.finish.reason is FinishReason.STOP


def test_the_end_of_sequence_has_text_where_stop_strings_are_included() -> None:
    stream = start(replace(OPTIONS, skip_special_tokens=False, include_stop_string=True))
    assert stream.feed([*ids("Hi"), EOS]) == "Hi</s>"
    stream = start(replace(OPTIONS, include_stop_string=True))
    assert stream.feed([*ids("Hi"), EOS]) == "Hi"


def test_an_ignored_end_of_sequence_is_an_ordinary_token_even_among_the_stop_ids() -> None:
    options = replace(OPTIONS, ignore_eos=True, skip_special_tokens=False, stop_token_ids=frozenset([EOS]))
    stream = start(options)
    assert stream.feed([*ids("a"), EOS, *ids("b")]) == "a</s>b"
    assert stream.finish is None


def test_a_stop_id_outside_the_vocabulary_only_ends() -> None:
    options = replace(OPTIONS, stop_token_ids=frozenset([UNKNOWN]), include_stop_string=True)
    stream = start(options)
    assert stream.feed([*ids("Hi"), UNKNOWN]) == "Hi"
    assert stream.finish == Finish(FinishReason.STOP, 2, stop_token_id=UNKNOWN)


def test_stop_ids_count_after_min_tokens() -> None:
    stream = start(replace(OPTIONS, min_tokens=2, skip_special_tokens=False))
    assert stream.feed([EOS, EOS, EOS]) == "</s></s>"
    assert stream.finish == Finish(FinishReason.STOP, 3, stop_token_id=EOS)


@pytest.mark.parametrize(("include", "expected"), [(False, "one,"), (True, "one, two")])
def test_a_stop_string_ends_the_text(include: bool, expected: str) -> None:
    stream = start(replace(OPTIONS, stop=(" two", "three"), include_stop_string=include))
    assert stream.feed(ids("one, two, three")) == expected
    assert stream.finish is not None
    assert (stream.finish.stop_string, stream.finish.stop_token_id) == (" two", None)
    assert stream.finish.tokens_seen == len(ids("one, two"))


def test_a_stop_string_counts_after_min_tokens_but_may_begin_before() -> None:
    tokens = [1000 + byte for byte in b"ababab"]
    stream = start(replace(OPTIONS, stop=("ab",), min_tokens=2))
    assert stream.feed(tokens) == "ab"
    assert stream.finish == Finish(FinishReason.STOP, 4, stop_string="ab")
    stream = start(replace(OPTIONS, stop=("ab",), min_tokens=3))
    assert stream.feed(tokens) == "ab"
    assert stream.finish == Finish(FinishReason.STOP, 4, stop_string="ab")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    stream = start(replace(OPTIONS, stop=("<|end|>",)))
    assert stream.feed(ids("a <|en")) == "a "
    assert stream.end(FinishReason.LENGTH) == "<|en"
    assert stream.finish is not None
    assert stream.finish.stop_string == ""


def test_a_character_cut_short_comes_out_at_the_end() -> None:
    stream = start()
    assert stream.feed([1000 + byte for byte in "é€".encode()[:-1]]) == "é"
    assert stream.end(FinishReason.LENGTH) == "\ufffd"


def test_a_stop_string_may_be_complete_only_with_the_end() -> None:
    stream = start(replace(OPTIONS, stop=("\ufffd",)))
    assert stream.feed([*ids("a"), 1000 + 0xE2]) == "a"
    assert stream.end(FinishReason.LENGTH) == ""
    assert stream.finish == Finish(FinishReason.STOP, 2, stop_string="\ufffd")


def test_the_engine_s_end_is_passed_on() -> None:
    stream = start()
    assert stream.feed(ids("Hi")) == "Hi"
    assert stream.end(FinishReason.STOP, 7) == ""
    assert stream.finish == Finish(FinishReason.STOP, 1, stop_token_id=7)


def test_an_unknown_id_ends_the_stream_with_an_error_after_its_text() -> None:
    stream = start(replace(OPTIONS, stop=("Hi!",)))
    assert stream.feed([*ids("Hi"), UNKNOWN]) == "Hi"
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ERROR
    assert stream.finish.error is not None
    assert stream.finish.error.code == "token_unknown"


def test_a_prompt_tail_of_another_model_is_refused() -> None:
    with pytest.raises(SluiceError, match="outside the vocabulary"):
        start(replace(OPTIONS, prompt_tail=(UNKNOWN,)), byte_level().vocabulary)
