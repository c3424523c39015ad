"""The session to one postprocess replica: tokens go out, text comes back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import grpc

from services.common.errors import ErrorKind, SluiceError
from services.common.packing import pack_u32, unpack_u32
from services.common.rpc.errors import from_detail, passed_on
from services.common.rpc.replicas import Replica
from services.gateway.clients.link import Link
from services.gateway.core.request import Finish, FinishReason, GenerationRequest, TokenizedPrompt
from sluice.v1 import common_pb2, postprocess_pb2, postprocess_pb2_grpc

if TYPE_CHECKING:
    from services.gateway.streams.stream import GenerationStream

MAX_WAITING_BYTES = 16 << 20
TOKEN_BYTES_PER_MESSAGE = 2 << 20
MOST_TOKENS = (1 << 32) - 1
MOST_OPEN_BYTES = 12 << 20
"""Of one stream; what travels with it fits beside it into the 16 MiB that a replica takes."""


@dataclass(slots=True)
class Sent:
    """How much of a stream its client has got.

    Attributes:
        text: code points of content.
        reasoning: code points of reasoning.
        calls: code points of arguments, by the index of each tool call that was begun.
        tokens: tokens that were told with their own bytes.
    """

    text: int = 0
    reasoning: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    tokens: int = 0


class TextEvents(Protocol):
    """What postprocess tells the switchboard."""

    def on_token_texts(self, stream: GenerationStream, pieces: list[bytes], offsets: Sequence[int]) -> None:
        """The bytes of a stream's next tokens, and the code points of text before them."""

    def on_text(self, stream: GenerationStream, piece: str) -> None:
        """The next text of a stream."""

    def on_reasoning(self, stream: GenerationStream, piece: str) -> None:
        """The next reasoning of a stream."""

    def on_tool_call(self, stream: GenerationStream, call: int, call_id: str, name: str, arguments: str) -> None:
        """The next piece of a tool call of a stream."""

    def on_degraded(self, stream: GenerationStream, reason: str) -> None:
        """A stream goes on with a fallback."""

    def on_finished(self, stream: GenerationStream, finish: Finish) -> None:
        """A stream is over."""

    def on_text_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """A stream could not be turned into text."""

    def on_broken(self, stream: GenerationStream, error: Exception) -> None:
        """Handling what a peer sent for a stream raised; the other streams of the message go on."""

    def on_post_connected(self, link: PostLink) -> None:
        """A replica takes streams."""

    def on_post_leaves(self, link: PostLink) -> None:
        """A replica asks for its streams to be moved to others."""

    def on_post_lost(self, link: PostLink, error: SluiceError) -> None:
        """A replica's session is gone, and with it every stream on it."""


class PostLink(Link[postprocess_pb2.PostSessionRequest, postprocess_pb2.TextBatch]):
    """The session to one postprocess replica."""

    def __init__(
        self,
        replica: Replica[postprocess_pb2_grpc.PostprocessAsyncStub],
        connect_timeout_s: float,
        events: TextEvents,
    ) -> None:
        super().__init__(
            f"postprocess at {replica.address}",
            replica.channel,
            connect_timeout_s,
            lambda error: events.on_post_lost(self, error),
        )
        self.leaving = False  # asked for its streams to be moved
        self.address = replica.address
        self.replica = replica
        self._stub = replica.stub
        self._events = events
        self._opens: list[tuple[postprocess_pb2.OpenStream, int]] = []  # each with its size, bytes
        self._columns: list[tuple[bytes, bytes, bytes]] = []
        self._column_bytes = 0
        self._ends: list[postprocess_pb2.EndStream] = []
        self._closes: list[int] = []

    def open(
        self,
        slot: int,
        request_id: str,
        request: GenerationRequest,
        prompt: TokenizedPrompt,
        trace: common_pb2.TraceContext | None,
        max_tokens: int,
        tokens: array[int] | None = None,
        sent: Sent | None = None,
    ) -> None:
        """Opens a stream that this link has adopted; its text goes to the events.

        Args:
            max_tokens: of the whole generation; text of further tokens is not wanted.
            tokens: of a stream that began on another session, all of them so far.
            sent: how much its client has got; only the rest goes to the events.

        Raises:
            SluiceError: TOO_LARGE when a replica would not take the message.
        """
        options = stream_options(request, prompt)
        options.max_tokens = min(max(max_tokens, 1), MOST_TOKENS)
        resume = None if tokens is None or sent is None else _resume(tokens, sent)
        if resume is not None:
            self._drop_columns(slot)
        opening = postprocess_pb2.OpenStream(
            slot=slot, request_id=request_id, options=options, trace=trace, resume=resume
        )
        if (size := opening.ByteSize()) > MOST_OPEN_BYTES:  # a replica would end the session, with all on it
            message = f"Stop strings and tools are {size} bytes with all that belongs to them; send fewer of them."
            raise SluiceError(ErrorKind.TOO_LARGE, message, code="request_too_large")
        self._opens.append((opening, size))
        self._wake()

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Passes token columns on, untouched; a replica that does not take them for long is given up."""
        if not self.connected:
            return  # whatever stream they belong to will be opened again with its tokens
        self._columns.append((slots, counts, token_ids))
        self._column_bytes += len(token_ids)
        if self._column_bytes > MAX_WAITING_BYTES:
            self.break_off()
        self._wake()

    def _drop_columns(self, slot: int) -> None:
        """Forgets tokens that still wait here for a stream: it is opened again, and told them as its past."""
        name = pack_u32([slot])
        if not any(name in slots for slots, _, _ in self._columns):
            return
        slots, counts, ids = (unpack_u32(b"".join(column)) for column in zip(*self._columns, strict=True))
        kept, start = (array("I"), array("I"), array("I")), 0
        for row, number in zip(slots, counts, strict=True):
            if row != slot:
                kept[0].append(row)
                kept[1].append(number)
                kept[2].extend(ids[start : start + number])
            start += number
        self._columns = [(pack_u32(kept[0]), pack_u32(kept[1]), pack_u32(kept[2]))] if kept[0] else []
        self._column_bytes = 4 * len(kept[2])

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """Says that the engine is done; a finish event answers."""
        self._ends.append(
            postprocess_pb2.EndStream(
                slot=slot, finish_reason=common_pb2.FinishReason.ValueType(int(reason)), stop_token_id=stop_token_id
            )
        )
        self._wake()

    def close_stream(self, slot: int) -> None:
        """Forgets a stream without an answer."""
        self._closes.append(slot)
        self._wake()

    def _open_call(self) -> grpc.aio.StreamStreamCall[postprocess_pb2.PostSessionRequest, postprocess_pb2.TextBatch]:
        return self._stub.Session()

    def _drain(self) -> postprocess_pb2.PostSessionRequest | None:
        if not (self._opens or self._columns or self._ends or self._closes):
            return None
        opens = self._take_opens()
        if self._opens:  # nothing must overtake the opening of its stream
            return postprocess_pb2.PostSessionRequest(opens=opens)
        columns = self._take_columns()
        message = postprocess_pb2.PostSessionRequest(opens=opens)
        if columns:
            slots, counts, token_ids = columns[0] if len(columns) == 1 else map(b"".join, zip(*columns, strict=True))
            message.tokens.slots = slots
            message.tokens.counts = counts
            message.tokens.token_ids = token_ids
        if not self._columns:  # an end must not overtake tokens
            message.ends.extend(self._ends)
            message.closes = pack_u32(self._closes)
            self._ends.clear()
            self._closes.clear()
        return message

    def _take_opens(self) -> list[postprocess_pb2.OpenStream]:
        taken, size = 0, 0
        while taken < len(self._opens):
            size += self._opens[taken][1]
            if taken and size > TOKEN_BYTES_PER_MESSAGE:
                break
            taken += 1
        opens, self._opens = self._opens[:taken], self._opens[taken:]
        return [opening for opening, _ in opens]

    def _take_columns(self) -> list[tuple[bytes, bytes, bytes]]:
        if self._column_bytes <= TOKEN_BYTES_PER_MESSAGE:
            columns, self._columns, self._column_bytes = self._columns, [], 0
            return columns
        taken, size = 0, 0
        while taken < len(self._columns) and size < TOKEN_BYTES_PER_MESSAGE:
            size += len(self._columns[taken][2])
            taken += 1
        columns, self._columns = self._columns[:taken], self._columns[taken:]
        self._column_bytes -= size
        return columns

    def _on_message(self, message: postprocess_pb2.TextBatch) -> None:
        events, find, on_text = self._events, self.streams.get, self._events.on_text
        text, start = message.text, 0
        for event in message.events:
            if event.HasField("tokens"):  # tokens come before their text
                self._each(event, tell_token_texts)
        for slot, length in zip(unpack_u32(message.slots), unpack_u32(message.text_lengths), strict=True):
            stream = find(slot)
            if stream is not None:
                try:
                    on_text(stream, text[start : start + length])
                except Exception as error:
                    events.on_broken(stream, error)
            start += length
        for event in message.events:
            self._each(event, tell_event)
        if message.draining:
            self.leaving = True
            self._events.on_post_leaves(self)

    def _each(
        self,
        event: postprocess_pb2.StreamEvent,
        tell: Callable[[TextEvents, GenerationStream, postprocess_pb2.StreamEvent], None],
    ) -> None:
        """Passes one event on; what it raises ends its stream only."""
        stream = self.streams.get(event.slot)
        if stream is not None:
            try:
                tell(self._events, stream, event)
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
    """How a generation's tokens become text."""
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
    )
    if parsing is not None:
        options.tool_parser = parsing.tool_parser
        options.reasoning_parser = parsing.reasoning_parser
        options.tools_json = parsing.tools_json
        options.tool_choice_json = parsing.tool_choice_json
        options.single_tool_call = parsing.single_tool_call
        options.chat_template_kwargs_json = parsing.template_kwargs_json
    return options


def tell_token_texts(events: TextEvents, stream: GenerationStream, event: postprocess_pb2.StreamEvent) -> None:
    """Passes the bytes of a stream's next tokens on."""
    tokens = event.tokens
    events.on_token_texts(stream, split_pieces(tokens.lengths, tokens.pieces), unpack_u32(tokens.text_offsets))


def tell_event(events: TextEvents, stream: GenerationStream, event: postprocess_pb2.StreamEvent) -> None:
    """Passes everything of a stream on but its plain text and the bytes of its tokens."""
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


def _resume(tokens: array[int], sent: Sent) -> postprocess_pb2.StreamResume:
    return postprocess_pb2.StreamResume(
        token_ids=pack_u32(tokens),
        text_sent=sent.text,
        reasoning_sent=sent.reasoning,
        calls=[postprocess_pb2.CallSent(index=call, arguments_sent=count) for call, count in sent.calls.items()],
        tokens_sent=sent.tokens,
    )


def split_pieces(lengths: bytes, pieces: bytes) -> list[bytes]:
    """The bytes of each token; `lengths` is packed u32."""
    ends = list(accumulate(unpack_u32(lengths)))
    return [pieces[start:end] for start, end in zip([0, *ends], ends, strict=False)]
