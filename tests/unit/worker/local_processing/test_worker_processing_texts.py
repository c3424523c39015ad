"""The text of all requests is made together, equals what postprocess makes, and ends requests where it ends."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind
from services.common.packages.model_files import ModelSpec
from services.postprocess.detokenize.stream import Finish, Limits, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.events import Content, Event, merge
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.vocabulary_registry import load
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from services.worker.contract.text_delta import TextUpdate
from services.worker.generation.response_sink import ContractViolation, ResponseSink, SinkParams
from services.worker.local_processing import batch_detokenizer as texts_module
from services.worker.local_processing.batch_detokenizer import BatchDetokenizer
from services.worker.local_processing.loading import load_texts
from tests.support.data.loaded_tokenizers import tiny_folder, tiny_hf
from tests.support.oracles.errors import raises_error

TOOLS = b'[{"type": "function", "function": {"name": "get_weather"}}]'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@cache
def vocabulary() -> Vocabulary:
    return load(ModelSpec("tiny", str(tiny_folder())))


def ids(text: str) -> list[int]:
    return tiny_hf().encode_text(text)


class ObservedStream(ResponseSink):
    """What a caller hears."""

    def __init__(self) -> None:
        super().__init__()
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.text = TextUpdate()
        self.terminal: Delta | None = None
        self.cached: int | None = None
        self.parts = 0

    def deliver_first(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        self.cached = cached_tokens

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        assert self.admits(token_ids, logprobs)
        self.delivered += len(token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs

    def deliver_text(self, text: TextUpdate) -> None:
        assert self.terminal is None
        self.parts += 1
        self.text.add(text)

    def deliver_terminal(self, delta: Delta) -> None:
        assert self.terminal is None
        self.terminal = delta

    @property
    def content(self) -> str:
        return "".join(event.text for event in self.text.events if isinstance(event, Content))


@dataclass
class Asked:
    """One request on a desk, from both its ends."""

    desk: BatchDetokenizer
    request: GenerateRequest
    heard: ObservedStream
    broken: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    sink: Sink | None = None

    @property
    def engine(self) -> Sink:
        assert self.sink is not None
        return self.sink

    @property
    def terminal(self) -> Delta:
        assert self.heard.terminal is not None
        return self.heard.terminal

    def begin(self, cached: int = 0) -> None:
        terms = SinkParams(lambda *_: None, lambda _, rule: self.broken.append(rule), vocab_size=1024, strict=True)
        self.heard.accept(GenerateContext(self.request.request_id), len(self.request.token_ids), terms, None)
        self.sink = self.desk.open(self.request, self.heard, terms, lambda: self.stops.append("stop"))
        self.sink.begin(cached)

    def end(self, reason: FinishReason, tokens: int) -> None:
        self.engine.finish(reason, Usage(4, tokens, 0))


def ask(desk: BatchDetokenizer, name: str = "r", before: Sequence[int] = (), **options: Any) -> Asked:
    prompt = array("I", [0, 20, 21, 1, *before])
    text_out = StreamOptions("tiny", **options)
    request = GenerateRequest(name, "tiny", prompt, text_out=text_out, resumed_tokens=len(before))
    return Asked(desk, request, ObservedStream())


@pytest.fixture
async def desk() -> AsyncIterator[BatchDetokenizer]:
    async with opened_desk() as desk:
        yield desk


class opened_desk:  # reads as a function
    """A desk of the tiny model."""

    async def __aenter__(self) -> BatchDetokenizer:
        spec = ModelSpec("tiny", str(tiny_folder()))
        self._desk, self._opener = await load_texts(spec, ParserNames(), lambda name, error: None)
        return self._desk

    async def __aexit__(self, *_: object) -> None:
        await self._desk.close()
        await self._opener.close()


async def step() -> None:
    """The event loop goes round."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def reference(tokens: Sequence[int], options: StreamOptions, name: str) -> tuple[list[Event], Finish]:
    """What the postprocess service makes of the same tokens at once."""
    return await StreamFactory(Limits()).parse(tokens, options, vocabulary(), FinishReason.LENGTH, name)


words = st.sampled_from(
    ("The quick ", "Grüße ", "😀", "你好", CALL, "<think>", "a</think>b", "stop", "st", " the", "\n\n")
)
outputs = st.lists(
    words.map(ids) | st.lists(st.integers(0, 541), max_size=4),
    min_size=1,
    max_size=8,
).map(lambda parts: [token for part in parts for token in part] or [5])
stops = st.lists(st.sampled_from(("stop", "top", "the", "😀", "好", "}", "  ", "zzz")), max_size=3, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.lists(outputs, min_size=1, max_size=4),
    strings=stops,
    include=st.booleans(),
    parsers=st.sampled_from((("", ""), ("hermes", ""), ("hermes", "deepseek_r1"), ("", "qwen3"))),
    seed=st.integers(0, 1 << 16),
)
async def test_ids_and_text_are_those_of_postprocess_however_the_engine_steps(
    outputs: list[list[int]], strings: list[str], include: bool, parsers: tuple[str, str], seed: int
) -> None:
    cuts = random.Random(seed)
    options: dict[str, Any] = {
        "stop": tuple(strings),
        "include_stop_string": include,
        "tool_parser": parsers[0],
        "reasoning_parser": parsers[1],
        "tools_json": TOOLS if parsers[0] else b"",
        "token_texts": cuts.random() < 0.5,
    }
    async with opened_desk() as desk:
        asked = [ask(desk, f"r{number}", **options) for number in range(len(outputs))]
        left = [list(output) for output in outputs]
        for one in asked:
            one.begin()
        while any(left):
            for one, rest in zip(asked, left, strict=True):
                count = cuts.randint(0, 3)
                push, rest[:count] = rest[:count], []
                if push and not one.stops:
                    one.engine.push(push)
            await step()
        for one, output in zip(asked, outputs, strict=True):
            if not one.stops:
                one.end(FinishReason.LENGTH, len(output))
        await step()
        assert len(desk) == 0
    for one, output in zip(asked, outputs, strict=True):
        assert one.request.text_out is not None
        events, finish = await reference(output, one.request.text_out, one.request.request_id)
        assert one.heard.token_ids == output[: finish.tokens_seen]
        assert merge(one.heard.text.events) == merge(event for event in events if event != Content(""))
        assert one.heard.text.finish == finish
        assert one.terminal.finish_reason == (FinishReason.STOP if finish.stop_string else FinishReason.LENGTH)
        assert one.terminal.usage is not None
        assert one.terminal.usage.completion_tokens == finish.tokens_seen
        if one.request.text_out.token_texts:
            assert one.heard.text.tokens is not None
            assert len(one.heard.text.tokens) == finish.tokens_seen


async def test_one_step_of_all_requests_is_one_call(desk: BatchDetokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [ask(desk, f"r{number}") for number in range(50)]
    for one in asked:
        one.begin()
    calls: list[int] = []
    feed = desk._session.feed

    def counted(slots: array[int], counts: array[int], tokens: array[int]) -> None:
        calls.append(len(slots))
        feed(slots, counts, tokens)

    monkeypatch.setattr(desk._session, "feed", counted)
    [first, *_] = ids("The")
    for _ in range(3):
        for one in asked:
            one.engine.push([first])
        await step()
    assert calls == [50, 50, 50]
    assert {one.heard.content for one in asked} == {tiny_hf().decode([first] * 3)}


async def test_a_stop_string_ends_the_request_in_the_engine_and_nothing_comes_after_it(desk: BatchDetokenizer) -> None:
    one = ask(desk, stop=("over",))
    one.begin(cached=3)
    output = ids("jumps over the lazy dog")
    logprobs = [PositionLogprobs(TokenLogprob(token, -1.0)) for token in output]
    one.engine.push(output, logprobs)
    assert one.heard.token_ids == []
    await step()
    assert one.stops == ["stop"]
    assert one.heard.content == "jumps "
    assert one.terminal.finish_reason is FinishReason.STOP
    assert one.heard.text.finish is not None
    assert one.heard.text.finish.stop_string == "over"
    kept = one.heard.text.finish.tokens_seen
    assert kept < len(output)
    assert one.heard.token_ids == output[:kept]
    assert one.heard.logprobs == logprobs[:kept]
    assert one.terminal.usage == Usage(4, kept, 3)
    one.engine.push([5])
    one.end(FinishReason.CANCELLED, len(output) + 1)
    await step()
    assert one.heard.token_ids == output[:kept]
    assert one.broken == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stop": ("",)}, "stop"),
        ({"stop": tuple(str(number) for number in range(2000))}, "stop"),
        ({"tool_parser": "no such"}, "tool_parser"),
        ({"tool_parser": "hermes", "tools_json": b"{"}, "tools"),
        ({"prompt_tail": (1 << 20,)}, "token_ids"),
    ],
)
async def test_invalid_options_are_refused_before_the_engine(
    desk: BatchDetokenizer, options: dict[str, Any], param: str
) -> None:
    one = ask(desk, **options)
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
        one.begin()
    assert len(desk) == 0


async def test_a_text_of_another_model_is_refused(desk: BatchDetokenizer) -> None:
    request = GenerateRequest("r", "tiny", array("I", [5]), text_out=StreamOptions("other"))
    with raises_error(param="postprocess.model"):
        Asked(desk, request, ObservedStream()).begin()


async def test_forgotten_request_receives_nothing(desk: BatchDetokenizer) -> None:
    one, other = ask(desk, "one"), ask(desk, "other")
    one.begin()
    other.begin()
    one.engine.push(ids("Hello"))
    other.engine.push(ids("Hello"))
    desk.forget("one")
    desk.forget("unknown")
    await step()
    assert one.heard.token_ids == []
    assert other.heard.content == "Hello"
    one.end(FinishReason.CANCELLED, 1)
    await step()
    assert one.heard.terminal is None
    assert len(desk) == 1


async def test_an_engine_is_held_to_its_contract_here_too(desk: BatchDetokenizer) -> None:
    one = ask(desk)
    one.begin()
    with pytest.raises(ContractViolation):
        one.engine.push([1 << 20])
    assert one.broken == ["gives ids of the vocabulary"]


async def test_a_defect_in_the_text_fails_those_it_concerns_and_the_desk_goes_on(
    desk: BatchDetokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ask(desk, "one")
    one.begin()

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(desk._session, "feed", broken)
    one.engine.push(ids("Hello"))
    await step()
    assert one.terminal.error is not None
    assert one.terminal.error.kind is ErrorKind.INTERNAL
    assert one.stops == ["stop"]
    assert len(desk) == 0
    after = ask(desk, "after")
    after.begin()
    after.engine.push(ids("Hello"))
    await step()
    assert after.heard.content == "Hello"


@settings(max_examples=40, deadline=None)
@given(output=outputs, strings=stops, data=st.data())
async def test_a_resumed_text_goes_on_where_the_first_worker_stopped(
    output: list[int], strings: list[str], data: st.DataObject
) -> None:
    options: dict[str, Any] = {"stop": tuple(strings), "tool_parser": "hermes", "tools_json": TOOLS}
    done = data.draw(st.integers(1, len(output)))
    async with opened_desk() as desk:
        first = ask(desk, **options)
        first.begin()
        for token in output[:done]:
            if not first.stops:
                first.engine.push([token])
                await step()
        if first.stops:
            return
        desk.forget("r")
        second = ask(desk, before=output[:done], **options)
        second.begin()
        for token in output[done:]:
            if not second.stops:
                second.engine.push([token])
                await step()
        if not second.stops:
            second.end(FinishReason.LENGTH, len(output) - done)
            await step()
    assert first.request.text_out is not None
    events, finish = await reference(output, first.request.text_out, "r")
    said = merge([*first.heard.text.events, *second.heard.text.events])
    assert said == merge(event for event in events if event != Content(""))
    assert [*first.heard.token_ids, *second.heard.token_ids] == output[: finish.tokens_seen]
    assert second.terminal.usage is not None
    assert second.terminal.usage.completion_tokens == finish.tokens_seen - done


async def test_a_text_that_had_ended_with_the_resumed_tokens_ends_at_once(desk: BatchDetokenizer) -> None:
    one = ask(desk, before=ids("jumps over"), stop=("over",))
    one.begin()
    await step()
    assert one.heard.token_ids == []
    assert one.terminal.finish_reason is FinishReason.STOP
    assert one.terminal.usage is not None
    assert one.terminal.usage.completion_tokens == 0
    assert one.stops == ["stop"]


async def test_slots_are_used_again_after_the_last(desk: BatchDetokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "MAX_SLOTS", 3)
    for number in range(7):
        one = ask(desk, f"r{number}")
        one.begin()
        one.engine.push(ids("Hello"))
        one.end(FinishReason.LENGTH, 1)
        await step()
        assert one.heard.content == "Hello"
