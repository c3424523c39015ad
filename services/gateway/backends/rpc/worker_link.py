"""The session to one worker: sends starts of generations and receives their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.base.packing import pack_u32
from services.common.base.shared_steps import shared_step
from services.common.base.tasks import asked_to_end
from services.common.rpc.errors import from_detail, passed_on
from services.common.rpc.frame_guard import PacedFrames
from services.common.rpc.generation import read_logprobs
from services.gateway.backends.rpc.link import Link, take_within
from services.gateway.backends.rpc.media_uploads import MediaUploads, Start, read_hashes
from services.gateway.backends.rpc.postprocess_link import TextEvents, dispatch_event, dispatch_token_texts
from services.gateway.backends.rpc.worker_messages import generate_request
from services.gateway.core.request import DisaggregationPart, FinishReason, PositionLogprobs
from services.gateway.core.stream_view import S, S_contra
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

START_BYTES_PER_MESSAGE = 4 << 20
MAX_START_BYTES = 64 << 20
"""Bytes of a start of a generation; a longer one is refused with TOO_LARGE."""
TOKEN_BYTES = 4
SESSION = "/sluice.v1.Worker/Session"
MAX_EXTRAS = 65_536
"""Extras of one message of a worker, which sends a few for each stream; a message with more ends the session."""
BATCH_TOKENS = Budget("batch_tokens", 1 << 18, "")
"""Tokens in one message of a worker; with more, its session and its generations end."""
_START_OVERHEAD_BYTES = 64
_MEDIA_MISSING = "media_missing"
"""Code of the error of a start whose files the worker does not have."""


class WorkerEvents(TextEvents[S_contra], Protocol[S_contra]):
    """Handles the events of a worker's streams; text events only where the engine detokenizes."""

    def on_prompt(self, stream: S_contra, token_ids: bytes) -> None:
        """Receives the token ids, packed u32, of a prompt that the worker tokenized."""

    def on_tokens(self, link: WorkerLink[Any], slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Receives token columns of many streams, each packed u32; rows of slots not on the link are dropped."""

    def on_logprobs(self, stream: S_contra, positions: list[PositionLogprobs]) -> None:
        """Receives log-probabilities of the next tokens."""

    def on_prompt_logprobs(self, stream: S_contra, positions: list[PositionLogprobs]) -> None:
        """Receives log-probabilities of the prompt."""

    def on_started(self, stream: S_contra, cached_tokens: int | None) -> None:
        """Is notified that prefill has completed."""

    def on_ended(
        self,
        stream: S_contra,
        reason: FinishReason,
        stop_token_id: int | None,
        completion_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """Is notified that the engine has finished."""

    def on_handoff(self, stream: S_contra, handoff: bytes) -> None:
        """Receives the handoff of a prefill worker for the decode worker."""

    def on_failed(self, stream: S_contra, error: SluiceError) -> None:
        """Is notified that the worker failed to finish the stream."""

    def on_worker_lost(self, link: WorkerLink[Any], error: SluiceError) -> None:
        """Is notified that a worker's session, and with it all of its streams, was lost."""


class WorkerLink(Link[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch, S]):
    """The session to one worker.

    Args:
        max_start_bytes: largest message that the worker accepts; a larger one would end the session.
        batch_tokens: maximum number of tokens in one message of the worker; exceeding it ends the session.
        on_media: called with the bytes of each media file that was sent, and whether it was sent before.
        frames: parses the messages of all workers; None: its own.

    Attributes:
        embedding: number of embedding calls in progress, which are separate from the session.
        keep: function that appends one token to its stream, by slot; most rows have one token.
        unsent: slots whose starts the last session has not sent.
    """

    def __init__(
        self,
        worker_id: str,
        address: str,
        channel: grpc.aio.Channel,
        connect_timeout_s: float,
        events: WorkerEvents[S],
        max_start_bytes: int = MAX_START_BYTES,
        batch_tokens: Budget = BATCH_TOKENS,
        max_pause_s: float = 0.0,
        on_media: Callable[[int, bool], None] = lambda size, again: None,
        frames: PacedFrames[worker_pb2.TokenBatch] | None = None,
    ) -> None:
        frames = frames or PacedFrames(worker_pb2.TokenBatch)
        super().__init__(
            f"worker {worker_id}",
            channel,
            connect_timeout_s,
            lambda error: events.on_worker_lost(self, error),
            max_pause_s,
            frames.parse,
        )
        self.worker_id = worker_id
        self.address = address
        self.stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        self._events = events
        self.embedding = 0
        self._active_at = 0.0
        self._max_start_bytes = max_start_bytes
        self._batch_tokens = batch_tokens
        self.keep: dict[int, Callable[[int], None]] = {}
        self._starts: list[Start] = []
        self._media = MediaUploads(on_media)
        self._repeatable: dict[int, Start] = {}  # starts with media, until their files turned out to be missing
        self._cancels: list[int] = []
        self.unsent: frozenset[int] = frozenset()

    @property
    def live(self) -> int:
        """Number of streams and embedding calls on the worker."""
        return len(self.streams) + self.embedding

    def adopt(self, stream: S) -> None:
        """Accepts messages of the worker for a stream."""
        super().adopt(stream)
        self.keep[stream.slot] = stream.tokens.append

    def release(self, stream: S) -> None:
        """Drops further messages of the worker for a stream."""
        super().release(stream)
        self.keep.pop(stream.slot, None)
        if stream.prompt.media:
            self._repeatable.pop(stream.slot, None)
            self._media.remove(stream.slot)

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the worker, or since it became busy if that is later."""
        return monotonic() - self._active_at

    def break_off_silent(self) -> None:
        """Ends the session as if the worker was lost, and opens its circuit breaker."""
        self.breaker.trip()
        self.break_off()

    async def responds(self, timeout_s: float) -> bool:
        """Returns whether the worker's process answers a health check in time, with any status, or sends a message."""
        health: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(self._channel)
        try:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or self.silent_s < timeout_s
        except grpc.aio.UsageError:
            pass  # the channel is closed: nothing is left to lose
        except asyncio.CancelledError:
            if asked_to_end():
                raise  # otherwise the channel was closed meanwhile
        return True

    def start(
        self,
        stream: S,
        request_id: str,
        rank: int | None = None,
        resumed: int = 0,
        part: DisaggregationPart | None = None,
    ) -> None:
        """Starts the generation of a stream that this link has adopted.

        Args:
            request_id: id of the request on this worker.
            rank: data-parallel rank; None: the worker chooses.
            resumed: how many of the stream's tokens precede the generation of this worker.
            part: role of this worker in a pair.

        Raises:
            SluiceError: TOO_LARGE when the message exceeds the worker's limit.
        """
        if len(self.streams) <= 1:  # the worker was idle
            self._active_at = monotonic()
        self.breaker.try_pass()
        message = generate_request(stream, request_id, rank, resumed, part)
        start = worker_pb2.SessionStart(slot=stream.slot, request=message)
        size = start.ByteSize()
        if size + _START_OVERHEAD_BYTES > self._max_start_bytes:
            raise SluiceError(
                ErrorKind.TOO_LARGE,
                f"The request takes {size} bytes as sent to a worker, but workers accept at most "
                f"{self._max_start_bytes}; shorten the prompt.",
                code="request_too_large",
            )
        if stream.prompt.media:
            self._repeatable[stream.slot] = start, size
        self._begin(stream, (start, size))

    def _begin(self, stream: S, start: Start) -> None:
        if self._media.add(start, (item.file for item in stream.prompt.media)):
            self._starts.append(start)
        self._wake()

    def cancel(self, slot: int) -> None:
        """Cancels a generation on the worker."""
        self._cancels.append(slot)
        self._wake()

    def _open_call(self) -> grpc.aio.StreamStreamCall[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch]:
        session: grpc.aio.StreamStreamMultiCallable[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch] = (
            self._channel.stream_stream(SESSION, worker_pb2.WorkerSessionRequest.SerializeToString)
        )
        return session()

    def _drain(self) -> worker_pb2.WorkerSessionRequest | None:
        if not self._starts and not self._cancels and not self._media:
            return None
        parts = []
        if self._media and not self._next_is_large:
            part, ready = self._media.next_part()
            parts.append(part)
            self._starts += ready
        starts = []  # workers limit the size of messages
        if not parts or not self._next_is_large:
            starts = take_within(self._starts, START_BYTES_PER_MESSAGE)
        # A cancel must not overtake the start of its generation.
        cancels: list[int] = []
        if not self._starts:
            cancels, self._cancels = self._cancels, []
        return worker_pb2.WorkerSessionRequest(
            media=parts, starts=starts, cancels=pack_u32(cancels) if cancels else b""
        )

    @property
    def _next_is_large(self) -> bool:
        """Whether the next start takes a message of its own."""
        return bool(self._starts) and self._starts[0][1] > START_BYTES_PER_MESSAGE

    @shared_step("gateway.worker_message")
    def _on_message(self, message: worker_pb2.TokenBatch) -> bool:
        self._active_at = monotonic()
        concerns_streams = bool(self.streams) and bool(message.slots or message.extras)
        if len(message.token_ids) > self._batch_tokens.limit * TOKEN_BYTES:
            self._end_invalid(
                self._batch_tokens.refuse(
                    f"The {self.peer} sent {len(message.token_ids) // TOKEN_BYTES} tokens in one message; at most "
                    f"{self._batch_tokens.limit} are accepted",
                    kind=ErrorKind.INTERNAL,
                )
            )
            return False
        if len(message.extras) > MAX_EXTRAS or len(message.slots) > self._batch_tokens.limit * TOKEN_BYTES:
            rows = max(len(message.extras), len(message.slots) // TOKEN_BYTES)
            self._end_invalid(
                self._batch_tokens.refuse(
                    f"The {self.peer} sent {rows} rows in one message, more than are accepted",
                    kind=ErrorKind.INTERNAL,
                )
            )
            return False
        if message.dropped_media:
            self._media.forget(read_hashes(message.dropped_media))
        if message.slots:
            self._events.on_tokens(self, message.slots, message.counts, message.token_ids)
        for extra in message.extras:
            stream = self.streams.get(extra.slot)
            if stream is None:
                continue
            try:
                self._on_extra(stream, extra)
            except Exception as error:
                self._events.on_broken(stream, error)
        return concerns_streams

    def _on_extra(self, stream: S, extra: worker_pb2.TokenExtra) -> None:
        events = self._events
        if extra.prompt_token_ids:
            events.on_prompt(stream, extra.prompt_token_ids)
        if extra.prompt_logprobs:
            events.on_prompt_logprobs(stream, list(map(read_logprobs, extra.prompt_logprobs)))
        if extra.logprobs:
            events.on_logprobs(stream, list(map(read_logprobs, extra.logprobs)))
        if extra.HasField("cached_tokens"):
            events.on_started(stream, None if extra.cached_tokens_later else extra.cached_tokens)
        if extra.events:
            self._on_text_events(stream, extra)
        if extra.finish_reason == common_pb2.FINISH_REASON_ERROR:
            error = from_detail(extra.error)
            if error.code != _MEDIA_MISSING or not self._repeat(stream):
                events.on_failed(stream, passed_on(error, self.peer))
        elif extra.finish_reason == common_pb2.FINISH_REASON_HANDOFF:
            events.on_handoff(stream, extra.handoff)
        elif extra.finish_reason:
            stop_token_id = extra.stop_token_id if extra.HasField("stop_token_id") else None
            reason = FinishReason.of(extra.finish_reason)
            usage = extra.usage
            if stream.request.text_only:
                stream.prompt = replace(stream.prompt, counted=usage.prompt_tokens)
            cached_tokens = usage.cached_tokens if usage.HasField("cached_tokens") else None
            events.on_ended(stream, reason, stop_token_id, usage.completion_tokens, cached_tokens)

    def _repeat(self, stream: S) -> bool:
        """Sends the media files and the start of a stream again; returns False if that was done before."""
        start = self._repeatable.pop(stream.slot, None)
        if start is None:
            return False
        self._media.forget([item.span.hash for item in stream.prompt.media])
        self._begin(stream, start)
        return True

    def _on_text_events(self, stream: S, extra: worker_pb2.TokenExtra) -> None:
        if not stream.request.engine_text:
            raise invalid(f"The {self.peer} sent text for a stream that postprocess detokenizes.")
        for event in extra.events:
            if event.HasField("tokens"):
                dispatch_token_texts(self._events, stream, event)
            dispatch_event(self._events, stream, event)

    def _reset(self) -> None:
        self.unsent = frozenset(start.slot for start, _ in self._starts)
        self._starts.clear()
        self._cancels.clear()
        self._media.clear()
        self._repeatable.clear()
