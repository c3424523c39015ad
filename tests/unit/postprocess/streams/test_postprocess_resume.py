"""Streams that go on elsewhere: wherever one is cut, its caller sees neither gap nor repeat."""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind
from services.postprocess.detokenize.stream import FinishReason, StreamOptions
from services.postprocess.streams.factory import INLINE_TOKENS
from services.postprocess.streams.resume import Resume
from tests.support.clients.post_client import Client, session_of
from tests.support.data.vocabularies import ALL, Known, tekken
from tests.support.oracles.parsing import RECORDED, TOOLS

ROW = array("I", [1])
PLAIN = StreamOptions("m", eos_token_ids=frozenset([2]))


def options_of(names: tuple[str, str]) -> StreamOptions:
    return replace(PLAIN, tool_parser=names[0], reasoning_parser=names[1], tools_json=json.dumps(TOOLS).encode())


async def lived(known: Known, options: StreamOptions, tokens: list[int], moves: list[int], step: int = 1) -> Client:
    """A stream that goes on elsewhere after each of `moves` tokens; its caller reads every `step` tokens."""
    client = Client()
    session = await session_of(known.vocabulary)
    session.open(1, "request", options, {})
    for at, token in enumerate(tokens):
        if at in moves and client.finish is None:
            await session.aclose()
            session = await session_of(known.vocabulary)
            session.open(1, "request", options, {}, client.resume(tokens[:at]))
            client.read(session)
        session.feed(ROW, ROW, array("I", [token]))
        if at % step == 0:
            client.read(session)
    if len(tokens) in moves and client.finish is None:
        session = await session_of(known.vocabulary)
        session.open(1, "request", options, {}, client.resume(tokens))
    session.end(1, FinishReason.STOP, None)
    client.read(session)
    await session.aclose()
    assert client.finish is not None
    return client


@pytest.mark.parametrize("names", [("", ""), *RECORDED], ids="-".join)
async def test_a_stream_can_move_after_any_token(names: tuple[str, str]) -> None:
    known = tekken()
    for text in RECORDED.get(names, ("Grüße 😀 from 你好 👩‍👩‍👧.",)):
        tokens = known.encode(text)
        options = replace(options_of(names), token_texts=True)
        undisturbed = await lived(known, options, tokens, [])
        for at in range(len(tokens) + 1):
            assert await lived(known, options, tokens, [at]) == undisturbed


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_moves_of_any_stream(data: st.DataObject) -> None:
    known = ALL[data.draw(st.sampled_from(sorted(ALL)))]()
    names = data.draw(st.sampled_from([("", ""), *RECORDED]))
    options = replace(
        options_of(names),
        stop=data.draw(st.sampled_from([(), ("a",), ("lo wo", '"}'), ("</",)])),
        min_tokens=data.draw(st.integers(0, 5)),
        skip_special_tokens=data.draw(st.booleans()),
        token_texts=data.draw(st.booleans()),
        prompt_tail=data.draw(st.lists(st.integers(0, known.vocabulary.size - 1), max_size=3)),
    )
    ids = st.lists(st.integers(0, known.vocabulary.size - 1), max_size=30)
    tokens = data.draw(ids) + known.encode(data.draw(st.sampled_from(["", *RECORDED.get(names, ())])))
    moves = data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))
    step = data.draw(st.integers(1, 4))
    undisturbed = asyncio.run(lived(known, options, tokens, [], step))
    assert seen(asyncio.run(lived(known, options, tokens, moves, step))) == seen(undisturbed)


def seen(client: Client) -> Client:
    """What a client receives: plain content may arrive as an event, or in the column of plain streams."""
    return replace(client, order=[each for each in client.order if each != "Content"])


async def test_a_long_stream_is_given_its_tokens_in_parts_while_others_go_on() -> None:
    known = tekken()
    tokens = known.encode("one two three " * (INLINE_TOKENS // 3))
    assert len(tokens) > 2 * INLINE_TOKENS // 3
    tokens = (tokens * 3)[: 2 * INLINE_TOKENS + 7]
    session, client = await session_of(known.vocabulary), Client()
    session.open(1, "request", PLAIN, {}, Resume(tokens, text_sent=5))
    session.open(2, "other", PLAIN, {})
    session.feed(array("I", [2, 1]), array("I", [1, 1]), array("I", [tokens[0], tokens[0]]))
    batch = session.drain()
    assert batch is not None
    assert list(batch.slots) == [2], "the other stream does not wait"
    session.end(1, FinishReason.STOP, None)
    await session.settle()
    client.read(session)
    assert client.content == known.decode([*tokens, tokens[0]], True)[5:]
    assert client.finish is not None
    assert client.finish.tokens_seen == len(tokens) + 1
    await session.aclose()


async def test_stream_closed_while_resuming_sends_nothing() -> None:
    session = await session_of(tekken().vocabulary)
    session.open(1, "request", PLAIN, {}, Resume(tekken().encode("word ") * (INLINE_TOKENS + 1)))
    await asyncio.sleep(0)
    session.close([1])
    await session.settle()
    assert session.drain() is None
    assert len(session) == 0
    await session.aclose()


async def test_resumed_stream_that_had_ended_ends_again() -> None:
    known, client = tekken(), Client()
    session = await session_of(known.vocabulary)
    tokens = known.encode("one two. stop here")
    session.open(1, "request", replace(PLAIN, stop=("stop",)), {}, Resume(tokens, text_sent=3))
    client.read(session)
    assert client.content == " two. "
    assert client.finish is not None
    assert client.finish.stop_string == "stop"
    assert len(session) == 0
    await session.aclose()


@pytest.mark.parametrize("tokens", [[], [1] * (INLINE_TOKENS + 1)], ids=["inline", "in parts"])
async def test_resume_with_more_tokens_than_sent_is_an_error(tokens: list[int]) -> None:
    session, client = await session_of(tekken().vocabulary), Client()
    session.open(1, "request", PLAIN, {}, Resume(tokens, text_sent=1))
    await session.settle()
    client.read(session)
    assert client.finish is not None
    assert client.finish.error is not None
    assert (client.finish.error.kind, client.finish.error.code) == (ErrorKind.INVALID_ARGUMENT, "resume_mismatch")
    assert len(session) == 0
    await session.aclose()


async def test_an_unknown_token_among_the_resumed_ones_ends_this_stream_only() -> None:
    session, client = await session_of(tekken().vocabulary), Client()
    session.open(1, "request", PLAIN, {}, Resume([10**6]))
    client.read(session)
    assert client.finish is not None
    assert client.finish.error is not None
    assert client.finish.error.code == "token_unknown"
    await session.aclose()


async def test_draining_session_notifies_once_and_streams_continue() -> None:
    session, client = await session_of(tekken().vocabulary), Client()
    session.open(1, "request", PLAIN, {})
    session.leave()
    batch = session.drain()
    assert batch is not None
    assert batch.draining
    session.feed(ROW, ROW, array("I", tekken().encode("word")[:1]))
    session.end(1, FinishReason.STOP, None)
    client.read(session)
    assert client.finish is not None
    assert not client.draining
    await session.aclose()
