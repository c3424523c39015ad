"""Text that a parser in another process makes beside the engine: it comes later than its tokens, and is theirs all the
same, so that another worker can go on wherever this one stops."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.common.child_rpc.child import ChildLimits
from services.common.packages.model_files import ModelSpec
from services.postprocess.detokenize.stream import StreamOptions
from services.postprocess.metrics import Metrics
from services.postprocess.parsers.events import Content
from services.postprocess.streams.factory import MAX_PARSER_MEMORY_MB, CustomParsers, StreamFactory
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest, PositionLogprobs, Usage
from services.worker.contract.text_delta import TextUpdate
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.local_processing.batch_detokenizer import BatchDetokenizer
from tests.support.waiting import until

SHOUTING = "tests.support.fakes.own_parsers:Shouting"
PROMPT = (0, 20, 21, 1)


class ObservedStream(ResponseSink):
    """What the caller of one request was told."""

    def __init__(self) -> None:
        super().__init__()
        self.token_ids: list[int] = []
        self.content = ""
        self.terminal: Delta | None = None

    def deliver_first(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        return

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        assert self.admits(token_ids, logprobs)
        self.delivered += len(token_ids)
        self.token_ids += token_ids

    def deliver_text(self, text: TextUpdate) -> None:
        self.content += "".join(event.text for event in text.events if isinstance(event, Content))

    def deliver_terminal(self, delta: Delta) -> None:
        self.terminal = delta

    def is_told(self, token_ids: list[int], content: str) -> bool:
        return (self.token_ids, self.content) == (token_ids, content)


class Bench:
    """A desk whose parsers run in another process."""

    def __init__(self, library: VocabularyRegistry, opener: StreamFactory) -> None:
        limits = SessionLimits()
        self.stops: list[str] = []
        self.desk = BatchDetokenizer(lambda wake: PostSession(library, limits, Metrics(), wake, None, opener), "tiny")

    def ask(self, before: Sequence[int] = (), stop: tuple[str, ...] = ()) -> tuple[ObservedStream, Sink]:
        heard = ObservedStream()
        options = StreamOptions("tiny", tool_parser=SHOUTING, stop=stop)
        prompt = array("I", [*PROMPT, *before])
        request = GenerateRequest("r", "tiny", prompt, text_out=options, resumed_tokens=len(before))
        terms = SinkParams(lambda *_: None, lambda _, rule: pytest.fail(rule), strict=True)
        heard.accept(GenerateContext("r"), len(prompt), terms, None)
        sink = self.desk.open(request, heard, terms, lambda: self.stops.append("r"))
        sink.begin(0)
        return heard, sink


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    library = VocabularyRegistry([ModelSpec("tiny", str(folder))], 300)
    opener = StreamFactory(SessionLimits().stream, CustomParsers([SHOUTING], ChildLimits(60, MAX_PARSER_MEMORY_MB)))
    await opener.start()
    await library.get("tiny")
    bench = Bench(library, opener)
    yield bench
    await bench.desk.close()
    await opener.close()


def ids(folder: Path, text: str) -> list[int]:
    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return found


def words_of(folder: Path, token_ids: list[int]) -> str:
    """What the parser says of these: the words that are complete."""
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids)
    return text[: text.rfind(" ") + 1].upper()


async def ended(heard: ObservedStream, sink: Sink, tokens: int) -> Delta:
    sink.finish(FinishReason.LENGTH, Usage(len(PROMPT), tokens, 0))
    await until(lambda: heard.terminal is not None)
    assert heard.terminal is not None
    return heard.terminal


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after its answers"])
async def test_wherever_one_worker_stops_the_next_goes_on(bench: Bench, folder: Path, waits: bool) -> None:
    output = ids(folder, "the dog jumps over the lazy fox and so on")
    for done in range(1, len(output)):
        first, engine = bench.ask()
        for token in output[:done]:
            engine.push([token])
            await asyncio.sleep(0)
        if waits:
            await until(partial(first.is_told, output[:done], words_of(folder, output[:done])))
        bench.desk.forget("r")
        told = len(first.token_ids)
        assert first.token_ids == output[:told]
        second, engine = bench.ask(before=first.token_ids)
        for token in output[told:]:
            engine.push([token])
            await asyncio.sleep(0)
        terminal = await ended(second, engine, len(output) - told)
        assert first.content + second.content == "THE DOG JUMPS OVER THE LAZY FOX AND SO ON"
        assert [*first.token_ids, *second.token_ids] == output
        assert terminal.usage == Usage(len(PROMPT), len(output) - told, 0)
        assert terminal.finish_reason is FinishReason.LENGTH


async def test_no_token_comes_after_a_stop_string(bench: Bench, folder: Path) -> None:
    output = ids(folder, "the dog jumps over")
    heard, engine = bench.ask(stop=("jumps",))
    for token in output:
        engine.push([token])
        await asyncio.sleep(0)
    await until(lambda: heard.terminal is not None)
    assert heard.content == "THE DOG "
    assert heard.token_ids == output[: len(heard.token_ids)]
    assert len(heard.token_ids) == len(ids(folder, "the dog jumps"))
    assert bench.stops == ["r"]
    assert heard.terminal is not None
    assert heard.terminal.finish_reason is FinishReason.STOP
    assert len(bench.desk) == 0
