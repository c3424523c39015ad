"""Frames of peers, from the smallest to the largest: what one peer sends leaves the others their share."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine, Iterator
from typing import Any, cast

import grpc
import httpx
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.common.base.budgets import BudgetPool
from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32
from services.common.net.intake.parts_pace import BYTES_PER_PART, FREE_PARTS, PARTS_PER_S, BodyParts, PartsPace
from services.common.rpc import frame_guard, session
from services.common.rpc.channels import READ_AHEAD_BYTES, open_channel
from services.common.rpc.frame_guard import FREE_BYTES, SLICE_BYTES, PacedFrames, check_frame, frame_slices, guarded
from services.common.rpc.server import STREAM_WINDOW, GrpcServer
from services.common.rpc.session import FRAMES, ClientSession, IdlePace
from services.common.settings.service import GrpcServiceSettings
from services.router.metrics import Metrics
from services.router.picker.server import PickerLimits, PickerService
from services.router.registration.stream_messages import (
    BYTES_PER_OP,
    MAX_INBOX_BYTES,
    MAX_MESSAGES,
    MAX_MESSAGES_OF_RANK,
    READ_FACTOR,
    FloodGuard,
    Inbox,
    SnapshotChunk,
    WorkerMessage,
    read_pace,
    size_of,
)
from services.router.rpc import workers as messages
from services.router.rpc.service import INBOX_LIMIT, read_messages
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from sluice.v1 import common_pb2, postprocess_pb2, preprocess_pb2, router_pb2, worker_pb2
from sluice.v1 import ext_proc_pb2 as ext_proc
from tests.support.fakes.hostile_worker import HostileWorker, card, extra, rows
from tests.support.oracles.errors import raises_error
from tests.support.servers.suite import Suite

STALL_S = 10.0
"""Longest answer to an honest client beside a flood; one frame of tiny parts took longer to be parsed."""
FILES = (preprocess_pb2, router_pb2, postprocess_pb2, worker_pb2)


def received() -> Iterator[Descriptor]:
    """Every message that a service receives, and the worker's half of a session."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert method.input_type is not None
                yield method.input_type
    yield worker_pb2.TokenBatch.DESCRIPTOR


def tiny(descriptor: Descriptor, size: int) -> Iterator[tuple[str, bytes]]:
    """Messages that consist of empty parts: of each repeated field, and of each field of a nested message."""
    for field in descriptor.fields:
        if field.type != FieldDescriptor.TYPE_MESSAGE or field.number > 15:
            continue
        tag = bytes([field.number << 3 | 2])
        if field.is_repeated:
            yield field.name, (tag + b"\0") * (size // 2)
        assert field.message_type is not None
        for inner in field.message_type.fields:
            if inner.type == FieldDescriptor.TYPE_MESSAGE and inner.is_repeated and inner.number <= 15:
                parts = (bytes([inner.number << 3 | 2]) + b"\0") * (size // 2)
                yield f"{field.name}.{inner.name}", tag + _varint(len(parts)) + parts


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


BOMBS = {
    f"{descriptor.name}.{name}": (descriptor, data)
    for descriptor in received()
    for name, data in tiny(descriptor, 4 << 20)
}


@pytest.mark.parametrize("name", BOMBS)
def test_message_of_empty_parts_is_refused_before_it_is_parsed(name: str) -> None:
    descriptor, data = BOMBS[name]
    GetMessageClass(descriptor).FromString(data)  # it is valid
    with raises_error(match="parts of less than 4 bytes", kind=ErrorKind.TOO_LARGE, code="budget_exceeded"):
        guarded(GetMessageClass(descriptor))(data)


def opaque(descriptor: Descriptor, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Messages with bytes or a text that look like tiny parts, in a field of a nested message."""
    for field in descriptor.fields:
        if field.message_type is None or field.number > 15 or field.message_type.GetOptions().map_entry:
            continue
        for inner in field.message_type.fields:
            if inner.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING):
                part = _varint(inner.number << 3 | 2) + _varint(len(content)) + content
                yield f"{field.name}.{inner.name}", bytes([field.number << 3 | 2]) + _varint(len(part)) + part


COLUMNS = {
    f"{descriptor.name}.{name}": (descriptor, data)
    for descriptor in received()
    for name, data in opaque(descriptor, b"\n\0" * (1 << 20))
}


@pytest.mark.parametrize("name", COLUMNS)
def test_bytes_that_look_like_tiny_parts_are_none(name: str) -> None:
    descriptor, data = COLUMNS[name]
    assert guarded(GetMessageClass(descriptor))(data).ByteSize() == len(data)


@given(vocabulary=st.integers(1, 2_000), streams=st.integers(1, 300), seed=st.integers(0, 9))
@example(vocabulary=100, streams=300, seed=0)
@settings(max_examples=20, deadline=None)
def test_tokens_of_many_streams_of_a_small_vocabulary_pass(vocabulary: int, streams: int, seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.randint(1, 600) for _ in range(streams)]
    ids = pack_u32([2 + 8 * draw.randrange(vocabulary) for _ in range(sum(counts))])  # many look like tags
    rows: dict[str, Any] = {"slots": pack_u32(range(streams)), "counts": pack_u32(counts), "token_ids": ids}
    for frame in (
        postprocess_pb2.PostSessionRequest(tokens=postprocess_pb2.TokenColumns(**rows)),
        worker_pb2.TokenBatch(**rows),
    ):
        check_frame(frame.SerializeToString(), frame.DESCRIPTOR)


@given(
    positions=st.integers(1, 3_000),
    top=st.integers(0, 20),
    first=st.integers(0, 130_000),
    ids=st.integers(0, 200_000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_large_messages_of_honest_workers_pass(positions: int, top: int, first: int, ids: int) -> None:
    frame = worker_pb2.TokenBatch(
        slots=pack_u32(range(ids)), counts=pack_u32([1] * ids), token_ids=pack_u32([10] * ids)
    )
    extra = frame.extras.add(slot=1, prompt_token_ids=pack_u32(range(ids)))
    for position in range(positions):
        tokens = [
            common_pb2.TokenLogprob(token_id=first + position + rank, logprob=-0.37 * rank, rank=rank)
            for rank in range(top + 1)
        ]
        extra.prompt_logprobs.add(chosen=tokens[0], top=tokens[1:])
    check_frame(frame.SerializeToString(), frame.DESCRIPTOR)
    events = [
        router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=index.to_bytes(8, "little")))
        for index in range(positions)
    ]
    batch = router_pb2.AttachRequest(events=router_pb2.KvEventBatch(sequence=1, events=events))
    check_frame(batch.SerializeToString(), batch.DESCRIPTOR)


@given(data=st.binary(max_size=64), repeats=st.integers(1, 20_000))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_checked_without_another_error(data: bytes, repeats: int) -> None:
    try:
        check_frame(data * repeats + bytes(FREE_BYTES), worker_pb2.TokenBatch.DESCRIPTOR)
    except SluiceError as error:
        assert error.kind is ErrorKind.TOO_LARGE  # noqa: PT017


class Scans:
    """Counts the bytes that checks of frames scan in each turn of the event loop."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.turns: list[int] = [0]
        self._scan = frame_guard._tiny_parts
        patch.setattr(frame_guard, "_tiny_parts", self._counted)

    def _counted(self, data: bytes, start: int, end: int, most: int) -> int:
        self.turns[-1] += end - start
        return self._scan(data, start, end, most)

    async def follow(self) -> None:
        """Begins a new count in each turn of the event loop."""
        while True:
            await asyncio.sleep(0)
            self.turns.append(0)


@given(texts=st.lists(st.integers(0, 3 << 20), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_large_message_is_checked_whole_in_slices_of_bounded_size(texts: list[int]) -> None:
    extras = [worker_pb2.TokenExtra(events=[postprocess_pb2.StreamEvent(text="x" * size)]) for size in texts]
    data = worker_pb2.TokenBatch(extras=extras).SerializeToString()
    with pytest.MonkeyPatch.context() as patch:
        scans = Scans(patch)
        for _ in frame_slices(data, worker_pb2.TokenBatch.DESCRIPTOR):
            scans.turns.append(0)
    assert sum(scans.turns) >= sum(texts) or len(data) <= FREE_BYTES
    assert max(scans.turns) <= len(texts) * SLICE_BYTES


async def test_large_frames_of_many_workers_take_turns_and_small_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    long = extra(1, events=[postprocess_pb2.StreamEvent(text="x" * (1 << 20))]).SerializeToString()
    small = rows((1, [1])).SerializeToString()
    frames, scans = PacedFrames(worker_pb2.TokenBatch), Scans(monkeypatch)
    following = asyncio.create_task(scans.follow())
    parsing = [asyncio.create_task(frames.parse(long)) for _ in range(5)]
    await asyncio.sleep(0.001)
    assert await frames.parse(small) == rows((1, [1]))
    assert not any(task.done() for task in parsing)
    for message in await asyncio.gather(*parsing):
        assert message is not None
        assert len(message.extras[0].events[0].text) == 1 << 20
    following.cancel()
    assert sum(scans.turns) >= 5 << 20
    assert max(scans.turns) <= SLICE_BYTES


async def test_stream_that_is_not_read_holds_a_bounded_amount_of_what_a_peer_sends() -> None:
    chunk, read, sent = bytes(64 << 10), 1_000, 0

    async def endless(requests: Any, context: Any) -> None:
        nonlocal sent
        while True:
            await context.write(chunk)
            sent += 1

    server = grpc.aio.server()
    handlers: Any = {"Endless": grpc.stream_stream_rpc_method_handler(endless)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", bounds_read_ahead=True) as channel:
        call: Any = channel.stream_stream("/test/Endless")()
        for _ in range(read):  # gRPC would learn from them to read ever more ahead
            await call.read()
        written = -1
        while written != sent:
            written = sent
            await asyncio.sleep(0.2)
        call.cancel()
    await server.stop(0)
    assert (sent - read) * len(chunk) <= 3 * READ_AHEAD_BYTES  # the kernel's buffers of the connection hold some too


class EndlessCall:
    """A call to a peer that sends one message without end; `pace_s` passes before each.

    Attributes:
        clock: seconds that have passed, pauses included.
    """

    def __init__(self, patch: pytest.MonkeyPatch, reads: int, pace_s: float) -> None:
        self.clock = 100.0
        self._left, self._pace_s, sleep = reads, pace_s, asyncio.sleep

        async def pause(seconds: float) -> None:
            self.clock += seconds
            await sleep(0)

        patch.setattr(session, "perf_counter", lambda: self.clock)
        patch.setattr(asyncio, "sleep", pause)

    async def read(self) -> Any:
        """Returns the next message, and the end of the stream after the last one."""
        self.clock += self._pace_s
        self._left -= 1
        return worker_pb2.TokenBatch() if self._left >= 0 else grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        """Has nothing to end."""


@pytest.mark.parametrize(("pace_s", "pauses"), [(0.0, True), (0.001, False)], ids=["flood", "load"])
async def test_session_that_sends_more_than_any_session_writes_is_read_at_a_bounded_rate(
    pace_s: float, pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message in a millisecond is what a session writes under load."""
    total, received = 10 * FRAMES, list[object]()
    call = EndlessCall(monkeypatch, total, pace_s)
    await ClientSession("worker", lambda: cast(Any, call), lambda: None, received.append).run()
    paused_s = call.clock - 100.0 - (total + 1) * pace_s
    assert len(received) == total
    assert paused_s > 0.7 if pauses else paused_s < 0.001


class Endless:
    """The context of a stream whose peer sends one message without end; counts what is read."""

    def __init__(self, message: Message) -> None:
        self.reads = 0
        self._message = message

    async def read(self) -> Message:
        """Returns the next message, after a turn of the event loop."""
        self.reads += 1
        await asyncio.sleep(0)
        return self._message


async def reads_in(seconds: float, context: Endless, streams: list[Coroutine[Any, Any, None]]) -> tuple[int, float]:
    """Runs streams; returns the messages read of them, and the seconds it took."""
    began = time.monotonic()
    tasks = [asyncio.create_task(stream) for stream in streams]
    await asyncio.sleep(seconds)
    reads, elapsed = context.reads, time.monotonic() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return reads, elapsed


@pytest.mark.parametrize("kind", ["one byte", "no byte", "nothing", "observed"])
async def test_bodies_in_tiny_parts_share_a_bounded_rate_at_the_picker(kind: str) -> None:
    part = {
        "one byte": ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b"x")),
        "no byte": ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody()),
        "nothing": ext_proc.ProcessingRequest(request_headers=ext_proc.HttpHeaders()),
        "observed": ext_proc.ProcessingRequest(observability_mode=True),
    }[kind]
    service = PickerService(cast(Any, None), PickerLimits(), BudgetPool("picker_bodies", 1 << 20, ""), Metrics())
    context, streams = Endless(part), 5
    reads, elapsed = await reads_in(
        0.4, context, [service.Process(cast(Any, None), cast(Any, context)) for _ in range(streams)]
    )
    assert reads >= streams * FREE_PARTS
    assert reads <= streams * (FREE_PARTS + 2) + elapsed * PARTS_PER_S


async def test_registration_stream_of_tiny_messages_is_read_at_a_bounded_rate() -> None:
    worker = messages.worker_of(router_pb2.Registration(worker_id="w", address="h:1", epoch=1, card=card("m")))
    inbox: Inbox[WorkerMessage] = Inbox(INBOX_LIMIT)
    context = Endless(router_pb2.AttachRequest(heartbeat=router_pb2.Heartbeat()))

    async def drained() -> None:
        while await inbox.take(10):
            continue

    streams = [read_messages(inbox, worker, cast(Any, context)), drained()]
    reads, elapsed = await reads_in(0.4, context, streams)
    per_s = READ_FACTOR * MAX_MESSAGES_OF_RANK / 10
    assert reads <= per_s * (elapsed + 2 * session.WINDOW_S)


@given(hashes=st.integers(0, 50_000), ops=st.integers(1, 30_000))
@settings(max_examples=30, deadline=None)
def test_messages_of_a_worker_wait_in_a_bounded_number_of_bytes(hashes: int, ops: int) -> None:
    batch = EventBatch(0, 1, (BlockOp(CacheOperation.STORED, Tier.DEVICE, bytes(8 * hashes)),) * ops)
    chunk = SnapshotChunk(0, 1, Tier.DEVICE, bytes(8 * hashes), last=False)

    async def waiting(message: WorkerMessage) -> int:
        inbox: Inbox[WorkerMessage] = Inbox(INBOX_LIMIT, size=size_of)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                while True:
                    await inbox.put(message)
        return len(await inbox.take(1))

    for message, size in ((batch, ops * (8 * hashes + BYTES_PER_OP)), (chunk, 8 * hashes)):
        count = asyncio.run(waiting(message))
        assert (count - 1) * size < MAX_INBOX_BYTES
        assert count == INBOX_LIMIT or count * size >= MAX_INBOX_BYTES


@given(ranks=st.integers(1, messages.MAX_RANKS), burst=st.integers(1, 60))
@example(ranks=1, burst=21)
@settings(max_examples=30, deadline=None)
def test_worker_that_sends_what_the_guard_allows_is_read_without_a_pause(ranks: int, burst: int) -> None:
    fields = card("m", data_parallel_size=ranks, total_blocks=100)
    worker = messages.worker_of(router_pb2.Registration(worker_id="w", address="h:1", epoch=1, card=fields))
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "perf_counter", lambda: now[0])
        pace, guard = read_pace(worker), FloodGuard(worker, lambda: now[0])
        most = min(MAX_MESSAGES_OF_RANK * ranks, MAX_MESSAGES)
        for _ in range(3 * most // (10 * burst)):  # three seconds of bursts
            now[0] += 10 * burst / most
            guard.count(burst, 0)
            assert sum(pace.pause_s() for _ in range(burst)) == 0


@given(sizes=st.lists(st.integers(BYTES_PER_PART, 64 << 10), max_size=50), tiny=st.integers(0, FREE_PARTS))
@settings(max_examples=40, deadline=None)
def test_body_in_parts_of_ordinary_sizes_never_waits_beside_a_flood_of_tiny_ones(sizes: list[int], tiny: int) -> None:
    pace = PartsPace(clock=lambda: 0.0)
    flood = BodyParts(pace)
    assert sum(flood.pause_s(1) for _ in range(1_000)) > 0
    body = BodyParts(pace)
    assert not any(body.pause_s(size) for size in [0] * tiny + sizes)


@pytest.mark.parametrize("way", ["generic", "registered", "both"])
async def test_message_of_empty_parts_reaches_no_handler_however_it_is_registered(way: str) -> None:
    _, bomb = BOMBS["AttachRequest.events.events"]
    server, handled = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), router_pb2.DESCRIPTOR), []

    async def handle(request: Message, _: Any) -> bytes:
        handled.append(request.ByteSize())
        return b""

    handlers: Any = {"Call": grpc.unary_unary_rpc_method_handler(handle, router_pb2.AttachRequest.FromString)}
    if way != "registered":
        server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    if way != "generic":
        server.server.add_registered_method_handlers("test", handlers)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        outcomes = []
        for method, data in (("Call", bomb), ("Call", bomb[:0]), ("Unknown", b""), ("Call", bomb)):
            try:
                call: Any = channel.unary_unary(f"/test/{method}")
                await call(data, timeout=20)
                outcomes.append(grpc.StatusCode.OK)
            except grpc.aio.AioRpcError as error:
                outcomes.append(error.code())
    await server.stop(0)
    refused, answered, unknown, again = outcomes
    assert answered is grpc.StatusCode.OK
    assert unknown is grpc.StatusCode.UNIMPLEMENTED
    assert grpc.StatusCode.OK not in (refused, again)
    assert handled == [0]


async def test_streams_that_are_not_read_hold_little_on_a_fast_connection() -> None:
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), router_pb2.DESCRIPTOR)
    streams, part = 8, bytes(64 << 10)
    done = asyncio.Event()

    async def read(_: Any, context: Any) -> bytes:
        while await context.read() is not grpc.aio.EOF:
            continue
        return b""

    async def hold(*_: Any) -> bytes:
        await done.wait()
        return b""

    methods = {"Read": read, "Hold": hold}
    handlers: Any = {name: grpc.stream_unary_rpc_method_handler(method) for name, method in methods.items()}
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    await server.start()

    async def held(channel: grpc.aio.Channel) -> int:
        call: Any = channel.stream_unary("/test/Hold")()
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while sent < 8 << 20:
                    await call.write(part)
                    sent += len(part)
        call.cancel()
        return sent

    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        fast: Any = channel.stream_unary("/test/Read")()
        for _ in range(800):  # by which gRPC would learn that the connection carries more
            await fast.write(part)
        sent = await asyncio.gather(*(held(channel) for _ in range(streams)))
    done.set()
    await server.stop(0)
    assert max(sent) <= STREAM_WINDOW + (512 << 10)  # and what the client buffers


def test_batch_of_too_many_kv_events_and_a_card_without_bounds_are_refused() -> None:
    worker = messages.worker_of(router_pb2.Registration(worker_id="w", address="h:1", epoch=1, card=card("m")))
    batch = router_pb2.KvEventBatch(sequence=1, events=[router_pb2.KvEvent()] * (messages.MAX_EVENTS + 1))
    with raises_error(match="events", kind=ErrorKind.INVALID_ARGUMENT, param="events"):
        messages.message_of(router_pb2.AttachRequest(events=batch), worker)
    for fields, param in (
        ({"chat_template": "x" * (3 << 20)}, "card"),
        ({"eos_token_ids": bytes(3 << 20)}, "card"),
        ({"total_blocks": 1 << 31}, "card.total_blocks"),
    ):
        registration = router_pb2.Registration(worker_id="w", address="h:1", epoch=1, card=card("m", **fields))
        with raises_error(match="send at most", kind=ErrorKind.INVALID_ARGUMENT, param=param):
            messages.worker_of(registration)


FRAMES_SENT: dict[str, bytes | Message] = {
    "empty": worker_pb2.TokenBatch(),
    "one row": rows((4_000_000, [1])),
    "one empty extra": worker_pb2.TokenBatch(extras=[worker_pb2.TokenExtra()]),
    "rows without tokens": worker_pb2.TokenBatch(slots=pack_u32([1] * 200_000), counts=bytes(800_000)),
    "empty extras": b"".join(data for name, (_, data) in BOMBS.items() if name == "TokenBatch.extras") * 12,
    "empty log-probabilities": b"".join(
        data for name, (_, data) in BOMBS.items() if name == "TokenBatch.extras.prompt_logprobs"
    ),
    "most tokens": rows((4_000_000, [1] * 200_000)),
    "longest string": extra(4_000_000, events=[postprocess_pb2.StreamEvent(text="x" * (8 << 20))]),
}


@given(sequence=st.lists(st.sampled_from(sorted(FRAMES_SENT)), min_size=2, max_size=6, unique=True))
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_honest_client_beside_frames_of_every_size_is_served(attacked: Suite, sequence: list[str]) -> None:
    asyncio.run(_flooded(attacked, ["empty", *sequence, "empty extras"]))


async def _flooded(suite: Suite, sequence: list[str]) -> None:
    body = {"model": "tekken", "prompt": [1, 2, 3], "max_tokens": 3}
    slowest, until = 0.0, time.monotonic() + 8
    async with HostileWorker("flood", "elsewhere") as worker, httpx.AsyncClient(base_url=suite.url, timeout=60) as http:
        attached = await worker.attach(suite.address("router"))
        await worker.connected()
        sending = asyncio.create_task(_keep_sending(worker, sequence))
        while time.monotonic() < until:
            started = time.monotonic()
            answer = await http.post("/v1/completions", json=body)
            slowest = max(slowest, time.monotonic() - started)
            assert answer.status_code == 200, answer.text
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert worker.sent
        await attached.close()
    assert slowest < STALL_S


async def _keep_sending(worker: HostileWorker, sequence: list[str]) -> None:
    while True:
        for name in sequence:
            frame = FRAMES_SENT[name]
            small = isinstance(frame, Message) and frame.ByteSize() < 100
            worker.send(*[frame] * (5_000 if small else 1))
            await worker.drained()
            await asyncio.sleep(0.01)


async def test_attach_with_a_message_of_empty_parts_ends_and_the_router_serves(attacked: Suite) -> None:
    _, data = BOMBS["AttachRequest.events.events"]
    async with HostileWorker("bomb", "elsewhere") as worker:
        attached = await worker.attach(attacked.address("router"))
        raw = grpc.aio.insecure_channel(attacked.address("router"))
        call: Any = raw.stream_stream("/sluice.v1.Router/Attach")()
        await call.write(data)
        assert await call.code() is not grpc.StatusCode.OK
        await raw.close()
        await attached.close()
    async with httpx.AsyncClient(base_url=attacked.url, timeout=60) as http:
        answer = await http.post("/v1/completions", json={"model": "tekken", "prompt": [1], "max_tokens": 1})
    assert answer.status_code == 200


class FloodingCall:
    """A call on which there is always another message."""

    def __init__(self) -> None:
        self.reads = 0

    async def read(self) -> bytes:
        self.reads += 1
        await asyncio.sleep(0)
        return b""

    def cancel(self) -> None: ...


async def flood(sessions: int, effect: bool, seconds: float) -> int:
    """Returns how many messages sessions read of peers that send as fast as they can."""
    idle, calls = IdlePace(per_s=500), [FloodingCall() for _ in range(sessions)]

    def opened(call: FloodingCall) -> ClientSession[Any, Any]:
        return ClientSession("worker", lambda: cast(Any, call), lambda: None, lambda message: effect, idle=idle)

    running = [asyncio.create_task(opened(call).run()) for call in calls]
    await asyncio.sleep(seconds)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    return sum(call.reads for call in calls)


async def test_messages_without_an_effect_are_read_at_one_pace_of_all_sessions() -> None:
    sessions, seconds = 40, 1.0
    assert await flood(sessions, effect=False, seconds=seconds) <= 500 * (seconds + 0.1) + 2 * sessions
    assert await flood(sessions, effect=True, seconds=seconds) > 4 * 500
