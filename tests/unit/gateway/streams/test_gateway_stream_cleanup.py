"""Orders of events that are rare: what one request does leaves nothing behind for the others, or for itself."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import ErrorKind, SluiceError, unavailable
from services.common.base.tasks import TaskOwner
from services.common.rpc.replicas import Replica
from services.gateway.apis.openai.completion_objects import stop_reason
from services.gateway.apis.openai.schemas import ChatCompletionRequest
from services.gateway.apis.openai.translate import chat_request
from services.gateway.apis.openai.validation import check
from services.gateway.backends.placement.disaggregation_policy import AUTO
from services.gateway.backends.placement.interfaces import Placement, PlacementRequest
from services.gateway.backends.placement.selector import WorkerSelector
from services.gateway.backends.rpc import link as link_module
from services.gateway.backends.rpc import postprocess_link as post_link
from services.gateway.backends.rpc import worker_link
from services.gateway.backends.rpc.postprocess_link import PostLink, stream_options
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.context import NO_CONTEXT
from services.gateway.core.request import (
    NULL_SINK,
    EmbedsPrompt,
    Finish,
    FinishReason,
    GenerationRequest,
    Parsing,
    Route,
    TokenPrompt,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.pipeline.postprocess_plugin import CustomPostprocessAdapter
from services.gateway.streams.manager import NO_RECOVERY
from services.gateway.streams.migration import MAX_CONCURRENT, Migrator
from services.gateway.streams.migration_policy import MigrationPolicy
from services.gateway.streams.postprocess_pool import MAX_REPLAYS
from services.gateway.streams.stream import GenerationStream
from sluice.v1 import worker_pb2
from tests.support.data.bodies import BUDGETS
from tests.support.fakes.streams import EOS, MAX_TOKENS, PROMPT, REQUEST, Sink, StreamTable
from tests.support.oracles.errors import raises_error


def link_to_nowhere(desk: StreamTable, max_start_bytes: int = worker_link.MAX_START_BYTES) -> WorkerLink:
    events, channel = desk.events, grpc.aio.insecure_channel("127.0.0.1:1")
    return WorkerLink("w0", "127.0.0.1:1", channel, 1.0, events, max_start_bytes)


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        pytest.param(5, [5, 6, 7], id="small"),
        pytest.param(2**63 - 1, [2**63 - 1, -(2**63), -(2**63) + 1], id="largest"),
    ],
)
def test_choices_of_a_seeded_request_get_distinct_seeds(seed: int, seeds: list[int]) -> None:
    desk = StreamTable()
    request = replace(REQUEST, choices=3, sampling=replace(REQUEST.sampling, seed=seed))
    for index in range(3):
        desk.connect(request=request, index=index)
    assert desk.workers[0].seeds == seeds


def test_stream_that_cannot_migrate_does_not_stop_the_others() -> None:
    desk = StreamTable()
    garbled = replace(PROMPT, eos_token_ids=b"\1\0\0")
    _, sink = desk.connect(prompt=garbled)
    first, _ = desk.connect(prompt=garbled, sink=sink)
    other, other_sink = desk.connect()
    desk.tokens([(first, [10]), (other, [10])])
    desk.lose_worker(0)
    (error,) = [end for end in sink.ends if isinstance(end, SluiceError)]
    assert error.kind is ErrorKind.INTERNAL
    assert other in desk.moving
    assert not other_sink.ends


class Siblings(Sink):
    """A choice whose failure ends the answer, and so the other choices."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def fail(self, error: SluiceError) -> None:
        super().fail(error)
        self._end()


def test_choices_that_end_with_a_lost_replica_leave_nothing_on_the_next() -> None:
    desk = StreamTable(posts=2)
    streams: list[GenerationStream] = []

    def end() -> None:
        for stream in streams:
            desk.stream_manager.cancel(stream)

    streams += [desk.connect(index=index, post=0, sink=Siblings(end))[0] for index in range(2)]
    streams[0].replays = MAX_REPLAYS  # its sibling was on luckier replicas
    desk.lose_post(0)
    assert desk.stream_manager.live == 0
    desk.check()
    desk.lose_post(1)
    assert not desk.stream_manager.texts.waiting
    desk.connect_post(0)
    desk.check()


def test_worker_lost_before_the_start_migrates_the_stream() -> None:
    desk = StreamTable()
    desk.workers[0].connected = False
    stream, _ = desk.connect()
    assert desk.moving == [stream]
    assert not desk.workers[0].slots, "it would wait for a session that may never come"
    desk.check()
    desk.resume(stream, 1)
    assert desk.workers[1].slots == {stream.slot}
    desk.check()


def test_a_pair_that_breaks_after_the_last_token_is_done() -> None:
    desk = StreamTable()
    asked: list[GenerationStream] = []

    def rescue(stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        asked.append(stream)
        return None

    desk.rescue = rescue
    stream, _ = desk.connect()
    desk.tokens([(stream, [10, 11, EOS])])
    desk.lose_worker(0)
    assert not asked, "no stream goes on after the end"
    assert cast(Any, stream.post).ends == {stream.slot: FinishReason.STOP}
    desk.check()


def test_usage_of_text_that_the_worker_made_and_did_not_count() -> None:
    desk = StreamTable()
    stream, sink = desk.connect(request=replace(REQUEST, engine_text=True))
    desk.tokens([(stream, [10, 11, EOS])])
    desk.lose_worker(0)
    assert [end.completion_tokens for end in sink.ends if isinstance(end, Finish)] == [3]


@dataclass
class FakeReplica:
    address: str = "127.0.0.1:2"
    channel: Any = None
    stub: Any = None


def stream_of(
    slot: int, request: GenerationRequest = REQUEST, prompt: Any = PROMPT, tokens: tuple[int, ...] = ()
) -> GenerationStream:
    made = GenerationStream(slot, request, 0, prompt, MAX_TOKENS, NULL_SINK, NO_CONTEXT, NO_RECOVERY)
    made.tokens.extend(tokens)
    return made


def words(*values: int) -> bytes:
    return array("I", values).tobytes()


def test_a_stream_that_is_opened_again_on_its_replica_gets_each_token_once() -> None:
    desk = StreamTable()
    link = PostLink(cast(Replica[Any], FakeReplica()), 1.0, desk.events)
    link._connected.set()
    link.open(stream_of(7))
    link.open(stream_of(8))
    link._drain()
    link.feed(words(7, 8), words(1, 2), words(100, 200, 201))
    link.feed(words(7), words(1), words(101))
    link.open(stream_of(7, tokens=(100, 101)))  # refused; its tokens still wait here
    link.feed(words(7), words(1), words(102))
    message = link._drain()
    assert message is not None
    assert message.opens[0].resume.token_ids == words(100, 101)
    assert message.tokens.slots == words(8, 7)
    assert message.tokens.counts == words(2, 1)
    assert message.tokens.token_ids == words(200, 201, 102)
    assert link._column_bytes == 0


async def test_starts_with_much_to_carry_do_not_travel_in_one_message() -> None:
    link = link_to_nowhere(StreamTable())
    embeds = EmbedsPrompt(bytes(4 * 256 * 1024), 1024)
    prompt = replace(PROMPT, token_ids=b"", embeds=embeds)
    for slot in range(16):
        link.start(stream_of(slot, prompt=prompt), f"r{slot}")
    link.cancel(3)
    sizes, started, cancelled = [], 0, b""
    while (message := link._drain()) is not None:
        assert isinstance(message, worker_pb2.WorkerSessionRequest)
        sizes.append(message.ByteSize())
        started += len(message.starts)
        cancelled += message.cancels
    assert started == 16
    assert cancelled == words(3)
    assert max(sizes) <= worker_link.START_BYTES_PER_MESSAGE + 1024, "a worker would refuse it, and end the session"


async def test_a_start_that_no_worker_would_take_ends_its_request_only() -> None:
    desk = StreamTable()
    link = link_to_nowhere(desk, 1 << 20)
    link._connected.set()
    prompts = [replace(PROMPT, token_ids=b"", embeds=EmbedsPrompt(bytes(4 * 1024 * rows), 1024)) for rows in (300, 200)]
    sinks = [desk.connect(link, prompt=prompt)[1] for prompt in prompts]
    (error,) = sinks[0].ends
    assert isinstance(error, SluiceError)
    assert (error.kind, error.http_status) == (ErrorKind.TOO_LARGE, 413)
    assert not sinks[1].ends
    assert desk.stream_manager.live == len(desk.booked) == link.live == 1
    message = link._drain()
    assert isinstance(message, worker_pb2.WorkerSessionRequest)
    assert len(message.starts) == 1


def test_openings_with_much_to_carry_do_not_travel_in_one_message() -> None:
    desk = StreamTable()
    link = PostLink(cast(Replica[Any], FakeReplica()), 1.0, desk.events)
    link._connected.set()
    request = replace(REQUEST, parsing=Parsing(tool_parser="auto", tools_json=b"[" + b" " * 500_000 + b"]"))
    for slot in range(40):
        link.open(stream_of(slot, request, tokens=(1, 2, 3)))
        link.feed(words(slot), words(1), words(4))
    sizes, opened = [], 0
    while (message := link._drain()) is not None:
        sizes.append(message.ByteSize())
        opened += len(message.opens)
        assert not message.tokens.slots or opened == 40, "nothing overtakes the opening of its stream"
    assert opened == 40
    assert max(sizes) <= 2 * post_link.TOKEN_BYTES_PER_MESSAGE


class Entries:
    """A registry of two models; the workers of one are disconnected."""

    workers: dict[str, Any] = {}  # noqa: RUF012

    def of_model(self, name: str) -> list[Any]:
        return []

    def model(self, name: str) -> Any:
        if name == "dead":
            raise unavailable("No worker serves model 'dead' now; try again soon.", code="no_workers")
        return cast(Any, type("Entry", (), {"block_size": 16}))


class Places:
    def __init__(self, worker: Any) -> None:
        self.worker = worker

    async def place(self, wanted: PlacementRequest, excluded: Any = ()) -> Placement:
        return Placement(Route("w1"), self.worker)


class NoConnections:
    def find(self, worker_id: str) -> None:
        return None


async def test_migration_of_a_model_without_workers_does_not_block_others() -> None:
    desk = StreamTable()
    tasks = TaskOwner()
    worker = cast(Any, desk.workers[0])
    worker.sessions = 1
    migrator = Migrator(
        MigrationPolicy(wait_s=60),
        cast(Any, Places(desk.workers[1])),
        AUTO,
        cast(Any, Entries()),
        cast(Any, NoConnections()),
        desk.stream_manager,
        GatewayMetrics(),
        tasks,
    )
    desk.take_over = lambda stream, worker, error: migrator.take_over(stream, worker, error)

    def connect(request: GenerationRequest) -> GenerationStream:
        return desk.connect(request=request)[0]

    dead = [connect(replace(REQUEST, model="dead")) for _ in range(MAX_CONCURRENT)]
    other = connect(REQUEST)
    desk.lose_worker(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert other.worker is cast(Any, desk.workers[1]), "it waits behind generations that no worker can take"
    assert all(stream.migration_task is not None for stream in dead)
    await tasks.close()


async def test_a_route_stage_that_fails_does_not_end_the_gateway() -> None:
    deaths: list[str] = []
    tasks = TaskOwner(on_death=lambda name, error: deaths.append(name))
    desk = StreamTable()

    class Broken:
        async def route(self, wanted: PlacementRequest, workers: Any) -> Route:
            raise KeyError("inside")

    placement = WorkerSelector(Broken(), desk, cast(Any, Entries()), cast(Any, NoConnections()), tasks)
    wanted = PlacementRequest(REQUEST, "b", PROMPT, 16, 0, cast(Any, type("D", (), {"share": lambda *_: 1.0})()))
    with raises_error(match="route stage", kind=ErrorKind.INTERNAL):
        await placement.place(wanted)
    await asyncio.sleep(0)
    assert not deaths


def test_requested_stop_id_is_reported() -> None:
    desk = StreamTable()
    reported = []
    for requested, hit in (((9, 10), 10), ((9, 10), EOS), ((), 10), ((0,), 0)):
        stream, sink = desk.connect(request=replace(REQUEST, stop=replace(REQUEST.stop, token_ids=requested)))
        desk.events.on_finished(stream, Finish(FinishReason.STOP, stop_token_id=hit, completion_tokens=1))
        (finish,) = sink.ends
        assert isinstance(finish, Finish)
        reported.append(stop_reason(finish))
    assert reported == [10, None, None, 0]


def test_streams_above_the_limit_are_refused_and_choices_being_placed_count() -> None:
    desk = StreamTable(max_streams=4)
    desk.connect()
    desk.stream_manager.expect(2)
    with raises_error(kind=ErrorKind.OVERLOADED):
        desk.stream_manager.admit(2)
    desk.stream_manager.admit(1)
    desk.stream_manager.settle(2)
    desk.stream_manager.admit(3)


def test_parser_of_a_tokenized_chat_receives_the_thinking_option() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"thinking": False}}
    request = chat_request(body, check(ChatCompletionRequest, body, BUDGETS), "r", 1, BUDGETS)
    cut = replace(request, prompt=TokenPrompt(b"\1\0\0\0"))  # as truncate_prompt_tokens makes it
    for one in (request, cut):
        assert stream_options(one, PROMPT).chat_template_kwargs_json == b'{"thinking":false}'


class Call:
    """A session whose peer says what it is given."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        message = await self.messages.get()
        if message is None:
            raise asyncio.CancelledError
        return message

    async def write(self, message: Any) -> None:
        pass

    def cancel(self) -> None:
        self.messages.put_nowait(None)


GARBLED = {
    "columns of two lengths": worker_pb2.TokenBatch(slots=words(1, 1), counts=words(1, 1), token_ids=words(5)),
    "half a number": worker_pb2.TokenBatch(slots=b"\1\0\0", counts=words(1), token_ids=words(5)),
}


@pytest.mark.parametrize("name", GARBLED)
async def test_worker_with_an_invalid_message_fails_only_its_generations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "INVALID_BACKOFF_S", (0.001, 0.001))
    deaths: list[str] = []
    tasks = TaskOwner(on_death=lambda task, error: deaths.append(task))
    desk = StreamTable()
    calls: list[Call] = []
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    link = WorkerLink("w9", "", channel, 1.0, desk.events)

    async def ready() -> None:
        pass

    monkeypatch.setattr(channel, "channel_ready", ready)

    def call() -> Any:
        calls.append(Call())
        return calls[-1]

    monkeypatch.setattr(link, "_open_call", call)
    tasks.spawn(link.run(), "link")
    async with asyncio.timeout(20):
        await link.ready()
        stream, sink = desk.connect(link)
        assert stream.slot == 1
        other, other_sink = desk.connect(1)
        while not calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        calls[0].messages.put_nowait(GARBLED[name].SerializeToString())
        while len(calls) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    (error,) = sink.ends
    assert isinstance(error, SluiceError)
    assert (error.kind, error.retryable) == (ErrorKind.INTERNAL, False), "what was heard so far may have gaps"
    assert not deaths
    assert not other_sink.ends
    assert desk.stream_manager.live == 1
    assert not link.breaker.passable
    assert other.worker is cast(Any, desk.workers[1])
    await tasks.close()


async def test_invalid_result_of_a_place_stage_fails_only_its_generation() -> None:
    desk = StreamTable()
    deaths: list[str] = []
    tasks = TaskOwner(on_death=lambda name, error: deaths.append(name))
    migrator = Migrator(
        MigrationPolicy(),
        cast(Any, Places(None)),
        AUTO,
        cast(Any, Entries()),
        cast(Any, NoConnections()),
        desk.stream_manager,
        GatewayMetrics(),
        tasks,
    )
    desk.take_over = lambda stream, worker, error: migrator.take_over(stream, worker, error)
    cast(Any, desk.workers[0]).sessions = 1
    _, sink = desk.connect()
    desk.lose_worker(0)
    async with asyncio.timeout(20):
        while not sink.ends:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    (error,) = sink.ends
    assert isinstance(error, SluiceError)
    assert error.kind is ErrorKind.INTERNAL
    assert not deaths
    assert not desk.booked
    assert desk.stream_manager.live == 0


class BrokenStage:
    """A postprocess stage that cannot begin."""

    def open(self, request: GenerationRequest, prompt: Any) -> Any:
        raise KeyError("inside")


def test_a_text_that_cannot_begin_leaves_nothing_on_its_worker() -> None:
    desk = StreamTable(posts=0)
    own = CustomPostprocessAdapter(BrokenStage(), desk.events)
    _, sink = desk.connect(custom_text=own)
    (error,) = sink.ends
    assert isinstance(error, SluiceError)
    assert error.kind is ErrorKind.INTERNAL
    assert not own.streams
    assert not desk.workers[0].slots
    desk.check()


def test_a_stream_that_no_replica_would_take_ends_its_request_only() -> None:
    desk = StreamTable(posts=0)
    link = PostLink(cast(Replica[Any], FakeReplica()), 1.0, desk.events)
    link._connected.set()
    desk.stream_manager.texts.links["post"] = link
    stops = [replace(REQUEST.stop, strings=("x" * size,)) for size in (17 << 20, 1 << 20)]
    sinks = [desk.connect(request=replace(REQUEST, stop=stop))[1] for stop in stops]
    (error,) = sinks[0].ends
    assert isinstance(error, SluiceError)
    assert error.kind is ErrorKind.TOO_LARGE
    assert not sinks[1].ends
    assert link.live == desk.stream_manager.live == len(desk.booked) == len(desk.workers[0].slots) == 1
    message = link._drain()
    assert message is not None
    assert len(message.opens) == 1
