"""Rigs of the steps in which the streams of a postprocess session meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

from services.common.base.packing import pack_u32, unpack_u32
from services.common.rpc.errors import from_detail
from services.postprocess import service, wire
from services.postprocess.detokenize.stream import Stream
from services.postprocess.detokenize.token_texts import TokenRecorder
from services.postprocess.streams import output_batch
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.session import PostSession
from sluice.v1 import common_pb2, postprocess_pb2
from tests.support.clients.post_client import session_of
from tests.support.data.vocabularies import tekken
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig

TEXT = 'Well, <tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call> naïve 😀'
PROBE = ROWS
"""Slot of the stream that shows whether the session works at the end."""

Patch = AbstractContextManager[Any]


class _Caller:
    """The caller of one session, which opens plain streams, ones with token texts and ones with a parser."""

    def __init__(self, session: PostSession) -> None:
        self.session = session
        self.outcome = Outcome({row: [] for row in range(ROWS)})
        self._rows: list[tuple[object, int]] = []  # the objects stay: another one at the same address has no row

    def row_of(self, stream: object) -> int | None:
        return next((row for kept, row in self._rows if kept is stream), None)

    def opening(self, slot: int) -> postprocess_pb2.OpenStream:
        options = postprocess_pb2.StreamOptions(
            model="m", token_texts=slot % 3 == 1, tool_parser="hermes" if slot % 3 == 2 else ""
        )
        return postprocess_pb2.OpenStream(slot=slot, request_id=f"request-{slot}", options=options)

    def send(self, **fields: Any) -> None:
        service.apply(self.session, postprocess_pb2.PostSessionRequest(**fields))
        self.read()

    def open_all(self) -> None:
        self.send(opens=map(self.opening, range(ROWS)))
        session = self.session
        self._rows = [(stream, slot) for slot, stream in session._streams.items()]
        self._rows += [(getattr(stream, "_stream", None), slot) for slot, stream in session._parsed.items()]
        self._rows += [(recorder, slot) for slot, recorder in session._output._recorders.items()]

    def feed(self, token: int, slots: range = range(ROWS)) -> None:
        columns = postprocess_pb2.TokenColumns(
            slots=pack_u32(slots), counts=pack_u32([1] * len(slots)), token_ids=pack_u32([token] * len(slots))
        )
        self.send(tokens=columns)

    def run(self) -> Outcome:
        """Runs all streams to their ends, and one more afterwards."""
        self.open_all()
        for token in tekken().encode(TEXT):
            self.feed(token)
        self.send(ends=map(_end, range(ROWS)))
        self.outcome.outputs[PROBE] = []
        self.send(opens=[self.opening(PROBE)])
        self.feed(tekken().encode("a")[0], range(PROBE, PROBE + 1))
        self.send(ends=[_end(PROBE)])
        self.outcome.alive = "text a" in self.outcome.outputs.pop(PROBE)
        return self.outcome

    def read(self) -> None:
        outputs = self.outcome.outputs
        while (batch := wire.to_text_batch(self.session.drain(), self.session.refuse)) is not None:
            batch = postprocess_pb2.TextBatch.FromString(batch.SerializeToString())
            start = 0
            for slot, length in zip(unpack_u32(batch.slots), unpack_u32(batch.text_lengths), strict=True):
                outputs[slot].append(f"text {batch.text[start : start + length]}")
                start += length
            for event in batch.events:
                if event.finish_reason == common_pb2.FINISH_REASON_ERROR:
                    assert event.slot not in self.outcome.errors, "a stream ends once"
                    self.outcome.errors[event.slot] = from_detail(event.error)
                else:
                    outputs[event.slot].append(str(event))


def _end(slot: int) -> postprocess_pb2.EndStream:
    return postprocess_pb2.EndStream(slot=slot, finish_reason=common_pb2.FINISH_REASON_STOP)


async def _run(patches: Callable[[_Caller], list[Patch]]) -> Outcome:
    session = await session_of(tekken().vocabulary)
    caller = _Caller(session)
    with ExitStack() as stack:
        for patch in patches(caller):
            stack.enter_context(patch)
        outcome = caller.run()
    await session.aclose()
    return outcome


def _patched(fault: Fault, owner: Any, name: str, row: Callable[..., int | None]) -> Patch:
    original = getattr(owner, name)
    wrapped = fault.wrap(original, row)
    return mock.patch.object(owner, name, lambda *args, **kwargs: wrapped(*args, **kwargs))


def _number(request_id: str) -> int:
    return int(request_id.removeprefix("request-"))


@rig("postprocess.apply")
async def apply(fault: Fault) -> Outcome:
    sequence = iter(range(ROWS))  # options are read in the order of the slots

    return await _run(
        lambda caller: [
            _patched(fault, service, "to_options", lambda message: next(sequence, None)),
            _patched(fault, StreamFactory, "plan", lambda factory, options, vocabulary, name: _number(name)),
            _patched(fault, Stream, "end", lambda stream, *rest: caller.row_of(stream)),
        ]
    )


@rig("postprocess.feed")
async def feed(fault: Fault) -> Outcome:
    return await _run(
        lambda caller: [
            _patched(fault, Stream, name, lambda stream, *rest: caller.row_of(stream))
            for name in ("feed", "feed_one", "peek")
        ]
    )


@rig("postprocess.take_output")
async def take_output(fault: Fault) -> Outcome:
    def patches(caller: _Caller) -> list[Patch]:
        def row_of_events(events: Any) -> int | None:
            pending = caller.session._output._events
            return next((slot for slot, found in pending.items() if found is events), None)

        return [
            _patched(fault, TokenRecorder, "take", caller.row_of),
            _patched(fault, output_batch, "merge", row_of_events),
            _patched(fault, Stream, "feed_one", lambda stream, *rest: _plain(caller.row_of(stream))),
        ]

    return await _run(patches)


def _plain(row: int | None) -> int | None:
    """Returns the row of a plain stream: its text is only joined, so it is made to fail elsewhere."""
    return row if row is not None and row % 3 == 0 else None


@rig("postprocess.serialize")
async def serialize(fault: Fault) -> Outcome:
    def patches(caller: _Caller) -> list[Patch]:
        def feed_one(stream: Stream, token: int) -> str:
            text = original(stream, token)
            return "\ud801" if fault.due(_plain(caller.row_of(stream))) else text

        original = Stream.feed_one
        return [
            mock.patch.object(Stream, "feed_one", feed_one),
            _patched(fault, wire, "to_event", lambda slot, *rest: slot),
            _patched(fault, wire, "_to_token_event", lambda slot, *rest: slot),
            _patched(fault, wire, "to_finish", lambda slot, finish: None if finish.error else slot),
        ]

    return await _run(patches)
