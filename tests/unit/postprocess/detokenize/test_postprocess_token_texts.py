"""What single tokens stand for, for logprobs: their own bytes and where they stand in the text."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import SluiceError
from services.postprocess.detokenize.stream import FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.token_texts import TokenTexts
from tests.support.clients.post_client import Client, session_of
from tests.support.data.vocabularies import ALL, TABLES, tekken

OPTIONS = StreamOptions("m", eos_token_ids=frozenset([2]), token_texts=True)
ROW = array("I", [1])


@given(st.data())
def test_bytes_and_offsets_are_those_of_the_text(data: st.DataObject) -> None:
    known = TABLES[data.draw(st.sampled_from(sorted(TABLES)))]()
    tokens = known.encode(data.draw(st.text("ab é你😀.\n", max_size=12)))
    stream = Stream(replace(OPTIONS, skip_special_tokens=False), known.vocabulary, Limits())
    text = stream.feed(tokens) + stream.end(FinishReason.STOP)
    assert stream.recorder is not None
    told = stream.recorder.take()
    assert len(told) == stream.tokens_seen
    pieces = split(told)
    assert b"".join(pieces).decode(errors="replace").lstrip() == text.lstrip(), "but for the space that opens a text"
    for piece, offset in zip(pieces, told.offsets, strict=True):
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


async def test_the_token_that_ends_a_stream_is_told_and_special_ones_are_spelled_out() -> None:
    known, client = tekken(), Client()
    session = await session_of(known.vocabulary)
    session.open(1, "r", OPTIONS, {})
    tokens = [*known.encode("Hi 😀"), 9, 2, 5, 5]
    session.feed(ROW, array("I", [len(tokens)]), array("I", tokens))
    client.read(session)
    assert client.finish is not None
    assert client.pieces[-2:] == [b"[TOOL_CALLS]", b"</s>"]
    assert b"".join(client.pieces[:-2]).decode() == "Hi 😀" == client.content
    assert client.offsets[-1] == len(client.content)
    assert len(client.pieces) == client.finish.tokens_seen
    await session.aclose()


async def test_streams_that_did_not_ask_are_not_told() -> None:
    session, client = await session_of(tekken().vocabulary), Client()
    session.open(1, "r", replace(OPTIONS, token_texts=False), {})
    session.feed(ROW, ROW, array("I", tekken().encode("word")[:1]))
    client.read(session)
    assert client.pieces == []
    await session.aclose()


async def test_tokens_come_at_once_even_while_their_text_is_held_back() -> None:
    session, client = await session_of(tekken().vocabulary), Client()
    session.open(1, "r", replace(OPTIONS, stop=("word of",)), {})
    session.feed(ROW, ROW, array("I", tekken().encode("word")[:1]))
    client.read(session)
    assert client.content == ""
    assert client.pieces == [b"word"]
    session.close([1])
    assert session.drain() is None
    await session.aclose()
