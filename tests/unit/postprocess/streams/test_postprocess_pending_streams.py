"""A stream that waits and cannot begin for a reason nobody foresaw is refused; its neighbours and the service go on."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from services.common.errors import ErrorKind
from services.common.models import ModelSpec
from services.postprocess.detokenize.stream import FinishReason, Limits, Stream, StreamOptions
from services.postprocess.metrics import Metrics
from services.postprocess.streams import pending as waiting
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from tests.support.data.vocabularies import tekken

OPTIONS = StreamOptions("m", eos_token_ids=frozenset([2]))
WAIT_S = 30


def fails_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, except that its first call raises what no code of ours raises on purpose."""
    calls: list[None] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise OSError("nobody foresaw it")
        return function(*args, **kwargs)

    return failing


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (VocabularyRegistry, "get"),
        (StreamFactory, "plan"),
        (StreamFactory, "prepare"),
        (StreamFactory, "begin"),
        (waiting, "fed"),
        (PostSession, "_join"),
    ],
)
async def test_only_the_stream_that_cannot_begin_is_refused(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fails_once(getattr(owner, name)))
    deaths: list[str] = []
    library = VocabularyRegistry([ModelSpec("m", "anywhere")], WAIT_S, lambda spec: tekken().vocabulary)
    session = PostSession(library, SessionLimits(), Metrics(), lambda: None, lambda task, error: deaths.append(task))
    for slot in (1, 2):
        session.open(slot, f"request-{slot}", OPTIONS, {})
    tokens = tekken().encode("fine")
    session.feed(array("I", [2]), array("I", [len(tokens)]), array("I", tokens))
    session.end(2, FinishReason.STOP, None)
    await asyncio.wait_for(session.settle(), WAIT_S)
    batch = session.drain()
    await session.aclose()
    await library.close()
    assert deaths == []
    assert batch is not None
    finishes = dict(batch.finishes)
    refused = finishes[1].error
    assert refused is not None
    assert refused.kind is ErrorKind.INTERNAL
    assert "foresaw" not in refused.message
    assert (batch.text, finishes[2].error) == ("fine", None)


@pytest.mark.parametrize("failure", [OSError("nobody foresaw it"), asyncio.CancelledError()])
async def test_a_stream_that_was_begun_in_vain_is_closed(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Stream] = []

    async def failing(stream: Stream, tokens: Any) -> str:
        raise failure

    monkeypatch.setattr(waiting, "fed", failing)
    monkeypatch.setattr(Stream, "close", lambda stream: closed.append(stream))
    library = VocabularyRegistry([ModelSpec("m", "anywhere")], WAIT_S, lambda spec: tekken().vocabulary)
    session = PostSession(library, SessionLimits(), Metrics(), lambda: None, stream_factory=StreamFactory(Limits()))
    session.open(1, "request-1", OPTIONS, {})
    await asyncio.wait_for(session.settle(), WAIT_S)
    await session.aclose()
    await library.close()
    assert len(closed) == 1
