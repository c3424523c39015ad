"""Many streams on one session, called directly."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.base.errors import ErrorKind, SluiceError
from services.common.observability import telemetry
from services.common.packages.model_files import ModelSpec
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.vocabulary import Vocabulary
from services.postprocess.metrics import Metrics
from services.postprocess.streams import pending as waiting_for
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.output_batch import Batch
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from tests.support.data.vocabularies import tekken
from tests.support.oracles.errors import raises_error

OPTIONS = StreamOptions("m", eos_token_ids=frozenset([2]))
LIMITS = SessionLimits(max_streams=4, max_message_tokens=50, max_waiting_tokens=10, max_backlog=100)


class Slow:
    """A loader that waits until it is told to go on, or fails."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.failure: SluiceError | None = None
        self.loop = asyncio.get_running_loop()

    def __call__(self, spec: ModelSpec) -> Vocabulary:
        asyncio.run_coroutine_threadsafe(self.gate.wait(), self.loop).result(30)
        if self.failure is not None:
            raise self.failure
        return tekken().vocabulary


def library_with(loader: Callable[[ModelSpec], Vocabulary]) -> VocabularyRegistry:
    return VocabularyRegistry([ModelSpec("m", "anywhere")], 30, loader)


@pytest.fixture
async def session() -> AsyncIterator[PostSession]:
    library = library_with(lambda spec: tekken().vocabulary)
    await library.load_all()
    session = PostSession(library, LIMITS, Metrics(), lambda: None)
    yield session
    await session.aclose()


@pytest.fixture
async def loader() -> Slow:
    return Slow()


@pytest.fixture
async def waiting(loader: Slow) -> AsyncIterator[PostSession]:
    """A session whose model is still loading."""
    library = library_with(loader)
    session = PostSession(library, LIMITS, Metrics(), lambda: None)
    yield session
    loader.gate.set()
    await session.settle()
    await session.aclose()
    await library.close()


def start(session: PostSession, *slots: int, options: StreamOptions = OPTIONS) -> None:
    for slot in slots:
        session.open(slot, f"request-{slot}", options, {})


def feed(session: PostSession, *rows: tuple[int, str | list[int]]) -> None:
    ids = [tekken().encode(row) if isinstance(row, str) else row for _, row in rows]
    session.feed(
        array("I", [slot for slot, _ in rows]), array("I", map(len, ids)), array("I", [i for row in ids for i in row])
    )


def texts(batch: Batch | None) -> dict[int, str]:
    assert batch is not None
    found, place = {}, 0
    for slot, length in zip(batch.slots, batch.text_lengths, strict=True):
        assert slot not in found
        found[slot], place = batch.text[place : place + length], place + length
    assert place == len(batch.text)
    return found


def finishes(batch: Batch | None) -> dict[int, Finish]:
    assert batch is not None
    assert len({slot for slot, _ in batch.finishes}) == len(batch.finishes)
    return dict(batch.finishes)


def error_codes(batch: Batch | None) -> dict[int, str]:
    return {slot: finish.error.code for slot, finish in finishes(batch).items() if finish.error is not None}


async def test_rows_of_a_slot_become_one_row_of_text(session: PostSession) -> None:
    start(session, 7, 3)
    feed(session, (7, "one "), (3, "Eins 😀"), (7, "two "))
    feed(session, (7, "three"), (99, "unknown"))
    assert texts(session.drain()) == {7: "one two three", 3: "Eins 😀"}
    assert session.drain() is None


async def test_a_slot_without_text_has_no_row(session: PostSession) -> None:
    start(session, 1, 2)
    feed(session, (1, [1000 + 0xE2]), (2, "a"))
    assert texts(session.drain()) == {2: "a"}


async def test_streams_end_by_themselves_and_by_the_engine(session: PostSession) -> None:
    start(session, 1, 2)
    start(session, 3, options=replace(OPTIONS, stop=("END",)))
    feed(session, (1, [*tekken().encode("a"), 2]), (2, "b"), (3, "text END more"))
    session.end(2, FinishReason.LENGTH, None)
    session.end(1, FinishReason.STOP, 2)
    batch = session.drain()
    assert texts(batch) == {1: "a", 2: "b", 3: "text "}
    assert finishes(batch) == {
        1: Finish(FinishReason.STOP, 2, stop_token_id=2),
        2: Finish(FinishReason.LENGTH, 1),
        3: Finish(FinishReason.STOP, len(tekken().encode("text END")), stop_string="END"),
    }
    assert len(session) == 0
    feed(session, (1, "late"))
    session.end(1, FinishReason.STOP, 2)
    assert session.drain() is None


async def test_a_bad_stream_hurts_only_itself(session: PostSession) -> None:
    start(session, 1)
    start(session, 2, options=replace(OPTIONS, model="other"))
    start(session, 3, options=replace(OPTIONS, tool_parser="nonsense"))
    start(session, 4, options=replace(OPTIONS, stop=("",)))
    start(session, 5)
    feed(session, (5, [200_000]), (1, "fine"))
    batch = session.drain()
    assert texts(batch) == {1: "fine"}
    assert error_codes(batch) == {2: "model_not_found", 3: "no_such_parser", 4: "", 5: "token_unknown"}
    assert {finish.reason for finish in finishes(batch).values()} == {FinishReason.ERROR}
    assert len(session) == 1


async def test_a_slot_in_use_ends_both_streams(session: PostSession) -> None:
    start(session, 1)
    feed(session, (1, "first"))
    start(session, 1)
    feed(session, (1, "unknown"))
    batch = session.drain()
    assert texts(batch) == {1: "first"}
    assert error_codes(batch) == {1: "slot_in_use"}
    assert len(session) == 0


async def test_more_streams_than_allowed_are_refused(session: PostSession) -> None:
    start(session, 1, 2, 3, 4, 5)
    assert error_codes(session.drain()) == {5: "overloaded"}
    session.close([1])
    start(session, 5)
    assert session.drain() is None


async def test_a_closed_stream_leaves_nothing_behind_and_its_slot_is_free(session: PostSession) -> None:
    start(session, 1, 2)
    feed(session, (1, "gone"), (2, [*tekken().encode("x"), 2]))
    session.close([1, 2, 99])
    start(session, 1)
    feed(session, (1, "new"))
    batch = session.drain()
    assert texts(batch) == {1: "new"}
    assert finishes(batch) == {}


async def test_columns_that_do_not_fit_end_the_session(session: PostSession) -> None:
    for slots, counts, ids in (([1], [1, 1], [5, 5]), ([1], [2], [5]), ([], [], [5])):
        with raises_error(match="are inconsistent", kind=ErrorKind.INVALID_ARGUMENT):
            session.feed(array("I", slots), array("I", counts), array("I", ids))


async def test_too_many_tokens_at_once_end_the_session(session: PostSession) -> None:
    with raises_error(match="too many", kind=ErrorKind.TOO_LARGE):
        feed(session, (1, [5] * 51))


async def test_a_caller_that_does_not_read_ends_the_session(session: PostSession) -> None:
    start(session, 1)
    with pytest.raises(SluiceError, match="does not read") as caught:  # noqa: PT012
        for _ in range(4):
            feed(session, (1, [1500] * 50))
    assert caught.value.kind is ErrorKind.OVERLOADED
    session.drain()
    feed(session, (1, [1500] * 50))


async def test_a_stream_waits_for_its_model(waiting: PostSession, loader: Slow) -> None:
    start(waiting, 1, 2, 3)
    feed(waiting, (1, "one "), (2, "zwei"))
    feed(waiting, (1, "two"))
    waiting.end(1, FinishReason.STOP, None)
    waiting.close([3])
    assert waiting.drain() is None
    loader.gate.set()
    await asyncio.wait_for(waiting.settle(), 30)
    batch = waiting.drain()
    assert texts(batch) == {1: "one two", 2: "zwei"}
    assert finishes(batch) == {1: Finish(FinishReason.STOP, len([*tekken().encode("one "), *tekken().encode("two")]))}
    assert len(waiting) == 1


async def test_tokens_that_wait_are_bounded(waiting: PostSession) -> None:
    start(waiting, 1, 2)
    feed(waiting, (1, [1500] * 8), (2, [1500] * 10))
    feed(waiting, (1, [1500] * 3))
    assert error_codes(waiting.drain()) == {1: "overloaded"}
    assert len(waiting) == 1


async def test_a_model_that_cannot_be_loaded_is_an_error_of_its_streams(waiting: PostSession, loader: Slow) -> None:
    loader.failure = SluiceError(ErrorKind.NOT_FOUND, "Gone.", code="gone")
    start(waiting, 1, 2)
    loader.gate.set()
    await asyncio.wait_for(waiting.settle(), 30)
    assert error_codes(waiting.drain()) == {1: "gone", 2: "gone"}


async def test_a_slot_reopened_while_its_model_loads_belongs_to_the_second_stream(
    waiting: PostSession, loader: Slow
) -> None:
    start(waiting, 1)
    feed(waiting, (1, "old"))
    waiting.close([1])
    start(waiting, 1)
    feed(waiting, (1, "new"))
    loader.gate.set()
    await asyncio.wait_for(waiting.settle(), 30)
    assert texts(waiting.drain()) == {1: "new"}
    assert len(waiting) == 1


async def test_draining_ends_with_the_last_answer(session: PostSession) -> None:
    start(session, 1)
    session.start_draining()
    start(session, 2)
    assert error_codes(session.drain()) == {2: "draining"}
    assert session.drain() is None
    assert not session.drained.is_set()
    session.end(1, FinishReason.LENGTH, None)
    assert list(finishes(session.drain())) == [1]
    assert not session.drained.is_set(), "the answer is not written yet"
    assert session.drain() is None
    assert session.drained.is_set()


async def test_a_traced_stream_is_a_span_of_its_request(session: PostSession, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    session.open(1, "good", OPTIONS, parent)
    session.open(2, "bad", OPTIONS, parent)
    session.open(3, "closed", OPTIONS, parent)
    feed(session, (1, [2]), (2, [200_000]))
    session.close([3])
    spans = {span.attributes["request_id"]: span for span in exporter.get_finished_spans() if span.attributes}
    assert {name: span.status.is_ok for name, span in spans.items()} == {"good": True, "bad": False, "closed": True}
    for span in spans.values():
        assert span.name == "postprocess.stream"
        assert span.parent is not None
        assert span.parent.span_id == 0xB7AD6B7169203331


WAIT_S = 30


def fails_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, except that its first call raises what no code of ours raises on purpose."""
    calls: list[None] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise OSError("unforeseen")
        return function(*args, **kwargs)

    return failing


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (VocabularyRegistry, "get"),
        (StreamFactory, "plan"),
        (StreamFactory, "prepare"),
        (StreamFactory, "begin"),
        (waiting_for, "fed"),
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


@pytest.mark.parametrize("failure", [OSError("unforeseen"), asyncio.CancelledError()])
async def test_a_stream_that_was_begun_in_vain_is_closed(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Stream] = []

    async def failing(stream: Stream, tokens: Any) -> str:
        raise failure

    monkeypatch.setattr(waiting_for, "fed", failing)
    monkeypatch.setattr(Stream, "close", lambda stream: closed.append(stream))
    library = VocabularyRegistry([ModelSpec("m", "anywhere")], WAIT_S, lambda spec: tekken().vocabulary)
    session = PostSession(library, SessionLimits(), Metrics(), lambda: None, stream_factory=StreamFactory(Limits()))
    session.open(1, "request-1", OPTIONS, {})
    await asyncio.wait_for(session.settle(), WAIT_S)
    await session.aclose()
    await library.close()
    assert len(closed) == 1
