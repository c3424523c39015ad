"""One stream: any split gives the same text and the same end."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import SluiceError
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.token_texts import TokenTexts
from services.postprocess.detokenize.vocabulary import Vocabulary
from tests.support.clients.post_client import Client, session_of
from tests.support.data.vocabularies import ALL, TABLES, byte_level, tekken

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
    text, finish = fed_in(start(), tokens, [], FinishReason.LENGTH)
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


TEXT_OPTIONS = StreamOptions("m", eos_token_ids=frozenset([2]), token_texts=True)
ROW = array("I", [1])


@given(st.data())
def test_bytes_and_offsets_are_those_of_the_text(data: st.DataObject) -> None:
    known = TABLES[data.draw(st.sampled_from(sorted(TABLES)))]()
    tokens = known.encode(data.draw(st.text("ab é你😀.\n", max_size=12)))
    stream = Stream(replace(TEXT_OPTIONS, skip_special_tokens=False), known.vocabulary, Limits())
    text = stream.feed(tokens) + stream.end(FinishReason.STOP)
    assert stream.recorder is not None
    reported = stream.recorder.take()
    assert len(reported) == stream.tokens_seen
    pieces = split(reported)
    assert b"".join(pieces).decode(errors="replace").lstrip() == text.lstrip(), "but for the space that opens a text"
    for piece, offset in zip(pieces, reported.offsets, strict=True):
        try:
            whole = piece.decode()
        except UnicodeDecodeError:
            continue
        assert text.startswith((whole, whole.lstrip()), offset)


def split(told: TokenTexts) -> list[bytes]:
    pieces, start = [], 0
    for length in told.lengths:
        pieces.append(bytes(told.pieces[start : start + length]))
        start += length
    return pieces


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_token_of_every_family_has_bytes(name: str) -> None:
    vocabulary = ALL[name]().vocabulary
    assert all(isinstance(piece, bytes) for piece in vocabulary.pieces(range(min(vocabulary.size, 400))))
    assert vocabulary.piece(vocabulary.size) is None
    with pytest.raises(SluiceError, match="outside the vocabulary"):
        vocabulary.pieces([vocabulary.size])


async def test_final_token_is_reported_and_special_tokens_have_text() -> None:
    known, client = tekken(), Client()
    session = await session_of(known.vocabulary)
    session.open(1, "r", TEXT_OPTIONS, {})
    tokens = [*known.encode("Hi 😀"), 9, 2, 5, 5]
    session.feed(ROW, array("I", [len(tokens)]), array("I", tokens))
    client.read(session)
    assert client.finish is not None
    assert client.pieces[-2:] == [b"[TOOL_CALLS]", b"</s>"]
    assert b"".join(client.pieces[:-2]).decode() == "Hi 😀" == client.content
    assert client.offsets[-1] == len(client.content)
    assert len(client.pieces) == client.finish.tokens_seen
    await session.aclose()


async def test_streams_without_the_option_report_no_tokens() -> None:
    session, client = await session_of(tekken().vocabulary), Client()
    session.open(1, "r", replace(TEXT_OPTIONS, token_texts=False), {})
    session.feed(ROW, ROW, array("I", tekken().encode("word")[:1]))
    client.read(session)
    assert client.pieces == []
    await session.aclose()


async def test_tokens_come_at_once_even_while_their_text_is_held_back() -> None:
    session, client = await session_of(tekken().vocabulary), Client()
    session.open(1, "r", replace(TEXT_OPTIONS, stop=("word of",)), {})
    session.feed(ROW, ROW, array("I", tekken().encode("word")[:1]))
    client.read(session)
    assert client.content == ""
    assert client.pieces == [b"word"]
    session.close([1])
    assert session.drain() is None
    await session.aclose()
