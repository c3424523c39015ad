"""The session to one postprocess replica: sends tokens and receives text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.shared_steps import shared_step
from services.common.observability import telemetry
from services.common.rpc.errors import from_detail, passed_on
from services.common.rpc.replicas import Replica
from services.gateway.backends.rpc.link import Link, take_within
from services.gateway.core.request import Finish, FinishReason, GenerationRequest, TokenizedPrompt
from services.gateway.core.stream_view import S, S_contra, StreamView
from sluice.v1 import common_pb2, postprocess_pb2, postprocess_pb2_grpc

MAX_PENDING_BYTES = 16 << 20
"""Bytes of token ids that wait to be sent to one replica; beyond it the session with it is broken off."""
TOKEN_BYTES_PER_MESSAGE = 2 << 20
MAX_TOKENS = (1 << 32) - 1
"""Tokens of one stream, as its field has 32 bits; a larger maximum is sent as this."""
MAX_OPEN_BYTES = 12 << 20
"""Bytes of the message that opens a stream, of 16 MiB that a replica accepts; more are refused with TOO_LARGE."""


class TextEvents(Protocol[S_contra]):
    """Handles the events of postprocess sessions; implemented by `LinkEvents`."""

    def on_token_texts(self, stream: S_contra, pieces: list[bytes], offsets: Sequence[int]) -> None:
        """Receives the bytes of the next tokens, and their offsets in the text, in code points."""

    def on_text(self, stream: S_contra, piece: str) -> None:
        """Receives the next text."""

    def on_reasoning(self, stream: S_contra, piece: str) -> None:
        """Receives the next reasoning text."""

    def on_tool_call(self, stream: S_contra, call: int, call_id: str, name: str, arguments: str) -> None:
        """Receives the next piece of a tool call."""

    def on_degraded(self, stream: S_contra, reason: str) -> None:
        """Is notified that the stream continues with a fallback."""

    def on_finished(self, stream: S_contra, finish: Finish) -> None:
        """Is notified that the stream has ended."""

    def on_text_failed(self, stream: S_contra, error: SluiceError) -> None:
        """Is notified that the replica failed to produce the stream's text."""

    def on_broken(self, stream: S_contra, error: Exception) -> None:
        """Is notified that handling a message for the stream raised; other streams of the message are unaffected."""

    def on_post_connected(self, link: PostLink[Any]) -> None:
        """Is notified that a replica accepts streams."""

    def on_post_leaves(self, link: PostLink[Any]) -> None:
        """Is notified that a replica drains and its streams must move."""

    def on_post_lost(self, link: PostLink[Any], error: SluiceError) -> None:
        """Is notified that a replica's session, and with it all of its streams, was lost."""


class PostLink(Link[postprocess_pb2.PostSessionRequest, postprocess_pb2.TextBatch, S]):
    """The session to one postprocess replica.

    Attributes:
        leaving: whether the replica drains and its streams must move.
        replica: the replica of the connection.
    """

    def __init__(
        self,
        replica: Replica[postprocess_pb2_grpc.PostprocessAsyncStub],
        connect_timeout_s: float,
        events: TextEvents[S],
        max_pause_s: float = 0.0,
    ) -> None:
        super().__init__(
            f"postprocess at {replica.address}",
            replica.channel,
            connect_timeout_s,
            lambda error: events.on_post_lost(self, error),
            max_pause_s,
        )
        self.leaving = False
        self.address = replica.address
        self.replica = replica
        self._stub = replica.stub
        self._events = events
        self._opens: list[tuple[postprocess_pb2.OpenStream, int]] = []  # each with its size, bytes
        self._columns: list[tuple[bytes, bytes, bytes]] = []
        self._column_bytes = 0
        self._ends: list[postprocess_pb2.EndStream] = []
        self._closes: list[int] = []

    def open(self, stream: S) -> None:
        """Opens a stream that this link has adopted, with its tokens so far and the output not to be repeated.

        Raises:
            SluiceError: TOO_LARGE when the message exceeds the replica's limit.
        """
        options = stream_options(stream.request, stream.prompt)
        options.max_tokens = min(max(stream.max_tokens, 1), MAX_TOKENS)
        resume = None
        if stream.tokens:
            resume = _resume(stream)
            self._drop_columns(stream.slot)
        opening = postprocess_pb2.OpenStream(
            slot=stream.slot,
            request_id=stream.request_id,
            options=options,
            trace=telemetry.trace_context(stream.current_span),
            resume=resume,
        )
        if (size := opening.ByteSize()) > MAX_OPEN_BYTES:  # would end the session with all of its streams
            message = f"Stop strings and tools take {size} bytes; send fewer or shorter ones."
            raise SluiceError(ErrorKind.TOO_LARGE, message, code="request_too_large")
        self._opens.append((opening, size))
        self._wake()

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Sends token columns unchanged; ends the session if too many are pending."""
        if not self.connected:
            return  # their streams will be opened again with all of their tokens
        self._columns.append((slots, counts, token_ids))
        self._column_bytes += len(token_ids)
        if self._column_bytes > MAX_PENDING_BYTES:
            self.break_off()
        self._wake()

    def _drop_columns(self, slot: int) -> None:
        """Drops pending tokens of a stream, which the opening message will contain."""
        packed_slot = pack_u32([slot])
        if not any(packed_slot in slots for slots, _, _ in self._columns):
            return
        slots, counts, ids = (unpack_u32(b"".join(column)) for column in zip(*self._columns, strict=True))
        remaining, start = (array("I"), array("I"), array("I")), 0
        for row, number in zip(slots, counts, strict=True):
            if row != slot:
                remaining[0].append(row)
                remaining[1].append(number)
                remaining[2].extend(ids[start : start + number])
            start += number
        self._columns = (
            [(pack_u32(remaining[0]), pack_u32(remaining[1]), pack_u32(remaining[2]))] if remaining[0] else []
        )
        self._column_bytes = 4 * len(remaining[2])

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """Ends a stream whose engine has finished; the replica responds with a finish event."""
        self._ends.append(
            postprocess_pb2.EndStream(
                slot=slot, finish_reason=common_pb2.FinishReason.ValueType(int(reason)), stop_token_id=stop_token_id
            )
        )
        self._wake()

    def close_stream(self, slot: int) -> None:
        """Closes a stream without further events."""
        self._closes.append(slot)
        self._wake()

    def _open_call(self) -> grpc.aio.StreamStreamCall[postprocess_pb2.PostSessionRequest, postprocess_pb2.TextBatch]:
        return self._stub.Session()

    def _drain(self) -> postprocess_pb2.PostSessionRequest | None:
        if not (self._opens or self._columns or self._ends or self._closes):
            return None
        opens = take_within(self._opens, TOKEN_BYTES_PER_MESSAGE)
        if self._opens:  # nothing may overtake the opening of its stream
            return postprocess_pb2.PostSessionRequest(opens=opens)
        columns = self._take_columns()
        message = postprocess_pb2.PostSessionRequest(opens=opens)
        if columns:
            slots, counts, token_ids = columns[0] if len(columns) == 1 else map(b"".join, zip(*columns, strict=True))
            message.tokens.slots = slots
            message.tokens.counts = counts
            message.tokens.token_ids = token_ids
        if not self._columns:  # an end may not overtake tokens
            message.ends.extend(self._ends)
            self._ends.clear()
            if self._closes:
                message.closes = pack_u32(self._closes)
                self._closes.clear()
        return message

    def _take_columns(self) -> list[tuple[bytes, bytes, bytes]]:
        if self._column_bytes <= TOKEN_BYTES_PER_MESSAGE:
            columns, self._columns, self._column_bytes = self._columns, [], 0
            return columns
        count, size = 0, 0
        while count < len(self._columns) and size < TOKEN_BYTES_PER_MESSAGE:
            size += len(self._columns[count][2])
            count += 1
        columns, self._columns = self._columns[:count], self._columns[count:]
        self._column_bytes -= size
        return columns

    @shared_step("gateway.text_message")
    def _on_message(self, message: postprocess_pb2.TextBatch) -> bool:
        concerns_streams = bool(self.streams) and bool(message.slots or message.events)
        events, find, on_text = self._events, self.streams.get, self._events.on_text
        text, start = message.text, 0
        for event in message.events:
            if event.HasField("tokens"):  # events receive tokens before their text
                self._dispatch(event, dispatch_token_texts)
        for slot, length in zip(unpack_u32(message.slots), unpack_u32(message.text_lengths), strict=True):
            stream = find(slot)
            if stream is not None:
                try:
                    on_text(stream, text[start : start + length])
                except Exception as error:
                    events.on_broken(stream, error)
            start += length
        for event in message.events:
            self._dispatch(event, dispatch_event)
        if message.draining:
            self.leaving = True
            self._events.on_post_leaves(self)
        return concerns_streams

    def _dispatch(
        self,
        event: postprocess_pb2.StreamEvent,
        dispatch: Callable[[TextEvents[S], S, postprocess_pb2.StreamEvent], None],
    ) -> None:
        """Dispatches one event; an exception fails only its stream."""
        stream = self.streams.get(event.slot)
        if stream is not None:
            try:
                dispatch(self._events, stream, event)
            except Exception as error:
                self._events.on_broken(stream, error)

    def _on_connected(self) -> None:
        self.leaving = False
        self._events.on_post_connected(self)

    def _reset(self) -> None:
        self._opens.clear()
        self._columns.clear()
        self._column_bytes = 0
        self._ends.clear()
        self._closes.clear()


def stream_options(request: GenerationRequest, prompt: TokenizedPrompt) -> postprocess_pb2.StreamOptions:
    """Returns the options for turning a generation's tokens into text."""
    stop, parsing = request.stop, request.parsing
    options = postprocess_pb2.StreamOptions(
        model=request.model,
        skip_special_tokens=request.skip_special_tokens,
        stop=stop.strings,
        include_stop_string=stop.include_stop_string,
        stop_token_ids=pack_u32(stop.token_ids) + (b"" if stop.ignore_eos else prompt.stop_token_ids),
        eos_token_ids=prompt.eos_token_ids,
        min_tokens=stop.min_tokens,
        prompt_tail=prompt.prompt_tail,
        ignore_eos=stop.ignore_eos,
        guided=request.guided is not None and not request.guided_calls,
        token_texts=request.token_texts,
        guided_calls=request.guided_calls,
        thinking=prompt.thinking,
    )
    if parsing is not None:
        options.tool_parser = parsing.tool_parser
        options.reasoning_parser = parsing.reasoning_parser
        options.tools_json = parsing.tools_json
        options.tool_choice_json = parsing.tool_choice_json
        options.single_tool_call = parsing.single_tool_call
        options.chat_template_kwargs_json = parsing.template_kwargs_json
    return options


def dispatch_token_texts(events: TextEvents[S], stream: S, event: postprocess_pb2.StreamEvent) -> None:
    """Dispatches the token bytes of an event."""
    tokens = event.tokens
    events.on_token_texts(stream, split_pieces(tokens.lengths, tokens.pieces), unpack_u32(tokens.text_offsets))


def dispatch_event(events: TextEvents[S], stream: S, event: postprocess_pb2.StreamEvent) -> None:
    """Dispatches everything of an event except token bytes."""
    if event.text:
        events.on_text(stream, event.text)
    if event.reasoning:
        events.on_reasoning(stream, event.reasoning)
    for call in event.tool_calls:
        events.on_tool_call(stream, call.index, call.id, call.name, call.arguments)
    if event.degraded:
        events.on_degraded(stream, event.degraded)
    if event.finish_reason == common_pb2.FINISH_REASON_ERROR:
        events.on_text_failed(stream, passed_on(from_detail(event.error), "postprocess service"))
    elif event.finish_reason:
        events.on_finished(
            stream,
            Finish(
                reason=FinishReason.of(event.finish_reason),
                stop_string=event.stop_string,
                stop_token_id=event.stop_token_id if event.HasField("stop_token_id") else None,
                completion_tokens=event.tokens_seen,
                reasoning_tokens=event.reasoning_tokens,
            ),
        )


def _resume(stream: StreamView) -> postprocess_pb2.StreamResume:
    sent = stream.sent
    return postprocess_pb2.StreamResume(
        token_ids=pack_u32(stream.tokens),
        text_sent=stream.text_sent,
        reasoning_sent=sent.reasoning,
        calls=[postprocess_pb2.CallSent(index=call, arguments_sent=count) for call, count in sent.calls.items()],
        tokens_sent=sent.tokens,
    )


def split_pieces(lengths: bytes, pieces: bytes) -> list[bytes]:
    """Returns the bytes of each token; `lengths` is packed u32."""
    ends = list(accumulate(unpack_u32(lengths)))
    return [pieces[start:end] for start, end in zip([0, *ends], ends, strict=False)]
