"""Rigs of the steps in which the gateway's streams meet: links, moves between them, and sweeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import grpc

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u32
from services.common.rpc.replicas import Replica
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.request import Finish
from services.gateway.pipeline.postprocess_plugin import CustomPostprocessAdapter
from services.gateway.pipeline.stages import TextDelta
from services.gateway.streams.stream import GenerationStream
from sluice.v1 import common_pb2, postprocess_pb2, worker_pb2
from tests.support.fakes.streams import EOS, PROMPT, REQUEST, Sink, StreamTable
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig

PROBE = ROWS
"""Row that shows whether the links work at the end."""


class _Sink(Sink):
    """Records what a client gets; each piece can fail."""

    def __init__(self, fault: Fault, row: int) -> None:
        super().__init__()
        self._fault, self._row = fault, row

    def text(self, piece: str) -> None:
        self._fault.at(self._row)
        super().text(piece)

    def logprobs(self, positions: Any) -> None:
        self.text(f"logprobs {positions}")

    def prompt_logprobs(self, positions: Any) -> None:
        self.text(f"prompt logprobs {positions}")

    def tokens(self, pieces: Any, offsets: Any) -> None:
        self.text(f"tokens {pieces} {list(offsets)}")

    def finish(self, finish: Finish) -> None:
        self._fault.at(self._row)
        super().finish(finish)


class _Rows:
    """ROWS streams of one table, and one more."""

    def __init__(self, fault: Fault, table: StreamTable | None = None) -> None:
        self.fault = fault
        self.table = table or StreamTable()
        self.streams: list[GenerationStream] = []
        self.sinks: list[_Sink] = []

    @property
    def manager(self) -> Any:
        return self.table.stream_manager

    def connect(self, worker: Any = 0, **options: Any) -> None:
        for row in range(ROWS + 1):
            stream, sink = self.table.connect(worker, sink=_Sink(self.fault, row), **options)
            self.streams.append(stream)
            self.sinks.append(cast(_Sink, sink))

    def row_of(self, stream: GenerationStream) -> int:
        return self.streams.index(stream) if stream in self.streams else -1

    def breaks(self, owner: Any, name: str) -> None:
        """Lets a method fail whose first argument is a stream."""
        setattr(owner, name, self.fault.wrap(getattr(owner, name), lambda stream, *rest: self.row_of(stream)))

    def outcome(self, extra: Callable[[int], Any] = lambda row: None) -> Outcome:
        outcome = Outcome({row: [*self.sinks[row].pieces, extra(row)] for row in range(ROWS)})
        for row, sink in enumerate(self.sinks):
            errors = [end for end in sink.ends if isinstance(end, SluiceError)]
            assert len(sink.ends) <= 1, "a stream ends once"
            if row < ROWS and errors:
                outcome.errors[row] = errors[0]
            elif row < ROWS:
                outcome.outputs[row] += sink.ends
            outcome.alive = outcome.alive and not (row == PROBE and errors)
        return outcome


class _Replica:
    address = peer = "post"
    channel = stub = None


@rig("gateway.text_message")
async def text_message(fault: Fault) -> Outcome:
    rows = _Rows(fault)
    link = PostLink(cast(Replica[Any], _Replica()), 1.0, rows.manager.events)
    link._connected.set()
    rows.connect()
    for stream in rows.streams:
        link.streams[stream.slot] = stream
    slots = [stream.slot for stream in rows.streams]
    call = postprocess_pb2.ToolCallDelta(index=0, id="a", name="f", arguments="{}")
    tokens = postprocess_pb2.TokenTexts(lengths=pack_u32([1]), pieces=b"t", text_offsets=pack_u32([0]))
    for final in (False, True):
        contents: list[dict[str, Any]] = [
            {"tokens": tokens},
            {"reasoning": "thought"},
            {"text": "more"},
            {"tool_calls": [call]},
            *([{"finish_reason": common_pb2.FINISH_REASON_STOP}] if final else []),
        ]
        events = [
            postprocess_pb2.StreamEvent(slot=slot, **content)
            for slot in (slots[:ROWS] if final else slots)
            for content in contents
        ]
        columns = {"slots": pack_u32(slots), "text_lengths": pack_u32([2] * len(slots)), "text": "ab" * len(slots)}
        link._on_message(postprocess_pb2.TextBatch(events=events, **cast(Any, columns)))
    outcome = rows.outcome()
    outcome.alive = outcome.alive and rows.sinks[PROBE].pieces.count("ab") == 2 and link.breaker.passable
    return outcome


@rig("gateway.worker_message")
async def worker_message(fault: Fault) -> Outcome:
    rows = _Rows(fault)
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    link = WorkerLink("w0", "", channel, 1.0, rows.manager.events)
    link._connected.set()
    rows.connect(link, request=replace(REQUEST, logprobs=0, prompt_logprobs=0))
    computed = rows.manager._reservations.prefill_complete
    rows.manager._reservations.prefill_complete = fault.wrap(computed, lambda reservation: int(reservation[4:]) - 1)
    rows.breaks(rows.manager.events, "on_ended")
    position = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=1, logprob=-1.0))
    slots = [stream.slot for stream in rows.streams]
    for number in range(2):
        extras = [
            worker_pb2.TokenExtra(
                slot=slot, logprobs=[position], prompt_logprobs=[position], cached_tokens=0 if number == 0 else None
            )
            for slot in slots
        ]
        if number:
            ends = {"finish_reason": common_pb2.FINISH_REASON_STOP, "stop_token_id": EOS}
            extras += [worker_pb2.TokenExtra(slot=slot, **cast(Any, ends)) for slot in slots[:ROWS]]
        columns = {"slots": pack_u32(slots), "counts": pack_u32([1] * len(slots)), "token_ids": pack_u32(slots)}
        link._on_message(worker_pb2.TokenBatch(extras=extras, **cast(Any, columns)))
    outcome = rows.outcome(lambda row: None if row == fault.row else list(rows.streams[row].tokens))
    outcome.alive = outcome.alive and len(rows.streams[PROBE].tokens) == 2 and link.breaker.passable
    await channel.close()
    return outcome


@rig("gateway.worker_lost")
def worker_lost(fault: Fault) -> Outcome:
    rows = _Rows(fault)
    rows.connect()
    rescue = rows.table.rescue
    rows.table.rescue = fault.wrap(rescue, lambda stream, *rest: rows.row_of(stream))
    rows.breaks(rows.table, "take_over")
    rows.table.lose_worker(0)
    moved = [rows.row_of(stream) for stream in rows.table.moving]
    for stream in list(rows.table.moving):
        rows.table.resume(stream, 1)
    outcome = rows.outcome(lambda row: row in moved)
    outcome.alive = outcome.alive and PROBE in moved
    return outcome


@rig("gateway.sweep_stalled")
def sweep_stalled(fault: Fault) -> Outcome:
    """The row that fails is one that has stalled, and whose end cannot be recorded either."""
    table = StreamTable()
    reservations = cast(Any, table.stream_manager._reservations)
    reservations.free = fault.wrap(reservations.free, lambda reservation, *rest: int(reservation[4:]) - 1)
    rows = _Rows(fault, table)
    rows.connect()
    for _ in range(2):
        for row, stream in enumerate(rows.streams):
            stream.active = row != fault.row
        rows.manager.sweep_stalled()
    return rows.outcome(lambda row: row in [rows.row_of(stream) for stream in rows.manager._streams.values()])


def _posts(rows: _Rows) -> Outcome:
    held = [sorted(rows.row_of(rows.manager._streams[slot]) for slot in post.held) for post in rows.table.posts]
    outcome = rows.outcome(lambda row: [row in slots for slots in held])
    outcome.alive = outcome.alive and any(PROBE in slots for slots in held)
    return outcome


@rig("gateway.open_waiting")
def open_waiting(fault: Fault) -> Outcome:
    rows = _Rows(fault, StreamTable(posts=1))
    (post,) = rows.table.posts
    post.connected = False
    rows.connect()
    rows.breaks(post, "open")
    rows.table.connect_post(0)
    return _posts(rows)


@rig("gateway.drain_texts")
def drain_texts(fault: Fault) -> Outcome:
    rows = _Rows(fault)
    rows.connect(post=0)
    rows.breaks(rows.table.posts[1], "open")
    rows.table.posts[0].leaving = True
    rows.manager.events.on_post_leaves(cast(PostLink, rows.table.posts[0]))
    return _posts(rows)


@rig("gateway.texts_lost")
def texts_lost(fault: Fault) -> Outcome:
    rows = _Rows(fault)
    rows.connect(post=0)
    rows.breaks(rows.table.posts[1], "open")
    rows.table.lose_post(0)
    return _posts(rows)


class _Stage:
    """A custom stage, whose streams raise or return something else than text."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._opened = 0

    def open(self, request: Any, prompt: Any) -> _StageStream:
        self._opened += 1
        return _StageStream(self._fault, self._opened - 1)


class _StageStream:
    def __init__(self, fault: Fault, row: int) -> None:
        self._fault, self._row = fault, row

    def feed(self, token_ids: Any) -> TextDelta:
        self._fault.at(self._row)
        if self._fault.due(self._row):
            return cast(TextDelta, None)
        if self._fault.due(self._row):
            return TextDelta(cast(str, b"bytes"))
        return TextDelta(f"{list(token_ids)}", reasoning="\ud83d\ude00")

    def end(self, reason: Any, stop_token_id: int | None) -> TextDelta:
        self._fault.at(self._row)
        return TextDelta("end")


@rig("gateway.custom_text")
def custom_text(fault: Fault) -> Outcome:
    rows = _Rows(fault, StreamTable(posts=0))
    adapter = CustomPostprocessAdapter(cast(Any, _Stage(fault)), rows.manager.events)
    rows.connect(custom_text=adapter, prompt=PROMPT)
    slots = pack_u32([stream.slot for stream in rows.streams])
    ones = pack_u32([1] * len(rows.streams))
    for token in (5, 6):
        adapter.feed(slots, ones, pack_u32([token] * len(rows.streams)))
    outcome = rows.outcome()
    outcome.alive = outcome.alive and rows.sinks[PROBE].pieces[-1] == "[6]"
    return outcome
