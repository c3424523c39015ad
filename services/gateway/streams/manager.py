"""Manages all generations in progress, from start to end.

Tokens are forwarded by `token_forwarder`; all other events of workers and postprocess replicas are handled here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import inf
from time import perf_counter

from services.common.errors import SHUTTING_DOWN, ErrorKind, SluiceError, internal, overloaded, unavailable
from services.common.observability import telemetry
from services.common.rows.shared_steps import shared_step
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.context import NO_CONTEXT, RequestContext
from services.gateway.core import deadlines
from services.gateway.core.request import (
    DisaggregationPart,
    Finish,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    Reservations,
    Role,
    Sink,
    TokenizedPrompt,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement.interfaces import Placement
from services.gateway.streams.audit import recorded
from services.gateway.streams.generation_metrics import GenerationMetrics
from services.gateway.streams.interfaces import CANCELLED, NoRecovery, StreamEnd, StreamObserver
from services.gateway.streams.postprocess_pool import PostprocessPool
from services.gateway.streams.running_memory import RunningMemory, RunningShare
from services.gateway.streams.stream import EngineEnd, GenerationStream, RecoveryPolicy, TextLink, WorkerPair
from services.gateway.streams.token_forwarder import TokenForwarder

log = logging.getLogger(__name__)

MAX_STREAMS = 4096
"""Concurrent generations of a gateway; more are rejected with 503."""
POST_WAIT_S = 10.0
"""Longest wait of a stream for a postprocess replica while none is available, seconds."""
NO_RECOVERY = NoRecovery()


class StreamManager:
    """All generations in progress in this process.

    Args:
        max_streams: maximum number of streams; more are refused with OVERLOADED.
        reservations: is told of reservations whose route does not name another.
        post_wait_s: how long a stream waits for a postprocess replica.
        observers: notified of the start and the end of every stream, in addition to the metrics.
        memory: None for one with the default limit.

    Attributes:
        memory: bounds the memory of the requests of all streams.
        texts: the postprocess replicas.
        forwarder: forwards tokens to them.
    """

    def __init__(
        self,
        max_streams: int,
        reservations: Reservations,
        metrics: GatewayMetrics,
        post_wait_s: float = POST_WAIT_S,
        observers: Sequence[StreamObserver] = (),
        memory: RunningMemory | None = None,
    ) -> None:
        self.memory = memory or RunningMemory()
        self._max_streams = max_streams
        self._reservations = reservations
        self._metrics = metrics
        self._observers: Sequence[StreamObserver] = (GenerationMetrics(), *observers)
        self._slots = count(1)
        self._pending = 0
        self._streams: dict[int, GenerationStream] = {}
        self.texts = PostprocessPool(self.give_up, self.on_degraded, self._isolated, metrics, post_wait_s)
        self.forwarder = TokenForwarder(self.texts)

    @property
    def live(self) -> int:
        """Number of streams in progress."""
        return len(self._streams)

    def computing(self, worker: WorkerLink) -> bool:
        """Returns whether a worker runs a generation."""
        return bool(worker.streams)

    def choices(self, stream: GenerationStream) -> list[GenerationStream]:
        """Returns the running streams of the same request."""
        if stream.request.choices == 1:
            return [stream]
        return [other for other in self._streams.values() if other.request is stream.request]

    def admit(self, choices: int) -> None:
        """Raises SluiceError(OVERLOADED) if `choices` more streams would exceed the limit."""
        running = len(self._streams) + self._pending
        if running + choices > self._max_streams:
            raise overloaded(
                f"The gateway has reached its limit of concurrent generations ({running}); try again later."
            )

    @contextmanager
    def expecting(self, choices: int) -> Iterator[None]:
        """Admits `choices` streams as `admit` does, and counts them while the block runs, before they are connected."""
        self.admit(choices)
        self._pending += choices
        try:
            yield
        finally:
            self._pending -= choices

    # --- from the pipeline ---

    def connect(
        self,
        request: GenerationRequest,
        index: int,
        prompt: TokenizedPrompt,
        placement: Placement,
        max_tokens: int,
        sink: Sink,
        context: RequestContext = NO_CONTEXT,
        recovery: RecoveryPolicy = NO_RECOVERY,
        custom_text: TextLink | None = None,
        memory: RunningShare | None = None,
    ) -> GenerationStream:
        """Starts choice `index` of a request, whose output goes to the sink.

        Args:
            placement: the worker, or the pair of workers, that runs it.
            context: the context of the request.
            recovery: continues the stream when its worker fails.
            custom_text: the custom stage that makes its text; None: the engine or a postprocess replica does.
            memory: what the request holds; the stream is one more holder of it.
        """
        slot = next(self._slots) & 0xFFFFFFFF
        sink = recorded(sink, context.audit)
        stream = GenerationStream(slot, request, index, prompt, max_tokens, sink, context, recovery, custom_text)
        if memory is not None:
            memory.add_holder()
            stream.memory = memory
        stream.span = telemetry.start_span(
            "gateway.generate", request_id=stream.request_id, worker=placement.worker.worker_id, choice=index
        )
        self._streams[slot] = stream
        for observer in self._observers:
            observer.on_started(stream)
        if context.deadline.at != inf:
            stream.expiry = asyncio.get_running_loop().call_at(
                context.deadline.at, self.give_up, stream, deadlines.overdue()
            )
        self._attach(stream, placement, stream.request_id)
        if slot not in self._streams:  # the start failed
            return stream
        if request.engine_text:
            self.texts.exclude(stream)
        elif prompt.raw is None:
            self.texts.open(stream)
        else:
            self.texts.defer(stream)
        return stream

    def resume(self, stream: GenerationStream, placement: Placement) -> None:
        """Continues a stream on another worker, or pair of workers, after its existing tokens."""
        stream.migration_task = None
        self._attach(stream, placement, f"{stream.request_id}-m{stream.migrations}")

    def _attach(self, stream: GenerationStream, placement: Placement, name: str) -> None:
        route, worker, prefill = placement
        for reason in (route.degraded, route.split_skipped):
            if reason:
                self.on_degraded(stream, reason)
        stream.attach(prefill or worker, route)
        self._notify_assigned(stream, prefill or worker)
        if prefill is None:
            self._start(stream, worker, route.rank, name, stream.resumed, None)
            return
        stream.pair = WorkerPair(worker, route.rank, name, stream.resumed)
        self._start(stream, prefill, route.prefill_rank, name, stream.resumed, DisaggregationPart(Role.PREFILL))

    def start_on_worker(
        self,
        stream: GenerationStream,
        worker: WorkerLink,
        rank: int | None,
        name: str,
        resumed: int,
        part: DisaggregationPart | None,
    ) -> None:
        """Continues a stream on another worker of the same reservation, with the first `resumed` tokens."""
        stream.switch_worker(worker)
        self._notify_assigned(stream, worker)
        self._start(stream, worker, rank, name, resumed, part)

    def _notify_assigned(self, stream: GenerationStream, worker: WorkerLink) -> None:
        for observer in self._observers:
            observer.on_assigned(stream, worker.worker_id)

    def _start(
        self,
        stream: GenerationStream,
        worker: WorkerLink,
        rank: int | None,
        name: str,
        resumed: int,
        part: DisaggregationPart | None,
    ) -> None:
        if not worker.connected:  # disconnected since it was chosen: the start might wait forever
            unreachable = SluiceError(ErrorKind.CANNOT_CONNECT, f"The {worker.peer} cannot be reached.")
            self._interrupted(stream, unreachable)
            return
        try:
            worker.start(stream, name, rank, resumed, part)
        except SluiceError as error:
            self._interrupted(stream, error)
        except Exception as error:
            self.on_broken(stream, error)

    def cancel(self, stream: GenerationStream) -> None:
        """Cancels a stream whose client has disconnected; its sink is not called again."""
        self._end(stream, CANCELLED)

    # --- from workers ---

    def on_tokens(self, link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Stores the tokens of the link's streams and forwards their columns to the postprocess sessions.

        Raises:
            ValueError: the columns are inconsistent.
        """
        self.forwarder.forward(link, slots, counts, token_ids)

    def on_prompt(self, stream: GenerationStream, token_ids: bytes) -> None:
        """Takes the token ids of a prompt that the worker tokenized, and opens the deferred postprocess stream."""
        if stream.prompt.raw is None:
            return
        stream.set_prompt_ids(token_ids)
        if not stream.request.engine_text:
            self.texts.open(stream)

    def on_logprobs(self, stream: GenerationStream, positions: list[PositionLogprobs]) -> None:
        """Passes log-probabilities of the next tokens to the sink, before the tokens' text."""
        stream.take_logprobs(positions)
        stream.sink.logprobs(positions)

    def on_prompt_logprobs(self, stream: GenerationStream, positions: list[PositionLogprobs]) -> None:
        """Passes log-probabilities of the prompt to the sink."""
        stream.take_prompt_logprobs(positions)
        stream.sink.prompt_logprobs(positions)

    def on_started(self, stream: GenerationStream, cached_tokens: int | None) -> None:
        """Handles the completion of prefill, once per reservation.

        Args:
            cached_tokens: prompt tokens found in the worker's cache; None: its engine counts them at the end.
        """
        if stream.worker is not None:
            stream.worker.breaker.succeeded()
        if stream.prompt.raw is not None and not stream.request.text_only:
            self.give_up(stream, internal("The worker tokenized the prompt but did not send its token ids."))
            return
        if stream.prefilled:
            return  # already reported, in a pair by the prefill worker
        stream.prefilled = True
        if cached_tokens is not None:
            _note_cached(stream, cached_tokens, first=not stream.computed)
        stream.computed = True
        if stream.reservation_id:
            (stream.reservations or self._reservations).prefill_complete(stream.reservation_id)

    def on_ended(
        self,
        stream: GenerationStream,
        reason: FinishReason,
        stop_token_id: int | None,
        completion_tokens: int,
        cached_tokens: int | None = None,
    ) -> None:
        """Handles the end of the engine's work; postprocess still sends the remaining text."""
        known = stream.attempt_cached
        if cached_tokens is not None and stream.pair is None and (known is None or cached_tokens > known):
            _note_cached(stream, cached_tokens, first=not stream.resumed)
        if reason is FinishReason.CANCELLED:
            self.release_worker(stream)
            self.give_up(stream, SluiceError(ErrorKind.CANCELLED, "The generation was cancelled on its worker."))
            return
        stream.completion_tokens = min(stream.resumed + completion_tokens, stream.max_tokens)
        self._engine_done(stream, EngineEnd(reason, stop_token_id))

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """Handles the handoff of a prefill worker."""
        if stream.pair is None or stream.handed_over:
            self._interrupted(stream, internal("The worker sent a handoff for a request that it was to finish."))
        else:
            stream.recovery.on_handoff(stream, handoff)

    def _engine_done(self, stream: GenerationStream, end: EngineEnd) -> None:
        stream.end = end
        if stream.worker is not None:
            stream.worker.release(stream)  # drop anything after the end
        if stream.post is not None:
            stream.post.end(stream.slot, *end)
        elif stream.request.engine_text:  # the last text has arrived together with the end
            calls = stream.request.text_only and stream.sent.calls and end.reason is FinishReason.STOP
            reason = FinishReason.TOOL_CALLS if calls else end.reason
            self.on_finished(stream, Finish(reason, "", end.stop_token_id, stream.completion_tokens))

    def on_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """Handles a failure reported by the worker."""
        self._interrupted(stream, error)

    def on_broken(self, stream: GenerationStream, error: Exception) -> None:
        """Fails only this stream after an exception while handling its events."""
        if isinstance(error, SluiceError):
            self.give_up(stream, error)
            return
        log.error("handling a stream failed", extra={"request": stream.request_id}, exc_info=error)
        self.give_up(stream, _internal_failure())

    @shared_step("gateway.worker_lost")
    def on_worker_lost(self, link: WorkerLink, error: SluiceError) -> None:
        """Handles the loss of a worker's session, which interrupts all of its generations."""
        for stream in list(link.streams.values()):
            self._isolated(stream, lambda lost: self._interrupted(lost, error))

    def _interrupted(self, stream: GenerationStream, error: SluiceError) -> None:
        """Finishes, recovers or fails a stream whose worker cannot continue it."""
        worker = stream.worker
        if worker is None:
            return
        if error.retryable and len(stream.tokens) == stream.resumed:
            worker.breaker.failed()
        end = stream.known_end()
        if end is not None:  # complete: only the worker's end message is missing
            self.release_worker(stream)
            stream.completion_tokens = len(stream.tokens)
            self._engine_done(stream, end)
            return
        remaining_error = stream.recovery.on_interrupted(stream, worker, error)
        if remaining_error is not None:
            self.release_worker(stream)
            self.give_up(stream, remaining_error)

    # --- from postprocess ---

    def on_token_texts(self, stream: GenerationStream, pieces: list[bytes], offsets: Sequence[int]) -> None:
        """Passes the bytes of the next tokens to the sink, before their text."""
        stream.sent.tokens += len(pieces)
        stream.sink.tokens(pieces, offsets)

    def on_text(self, stream: GenerationStream, piece: str) -> None:
        """Passes the next text to the sink."""
        stream.active = True
        stream.text_sent += len(piece)
        if not stream.first_text_at:
            stream.first_text_at = perf_counter()
        stream.sink.text(piece)

    def on_reasoning(self, stream: GenerationStream, piece: str) -> None:
        """Passes the next reasoning text to the sink."""
        _mark_active(stream)
        stream.sent.reasoning += len(piece)
        stream.sink.reasoning(piece)

    def on_tool_call(self, stream: GenerationStream, call: int, call_id: str, name: str, arguments: str) -> None:
        """Passes the next piece of a tool call to the sink."""
        _mark_active(stream)
        calls = stream.sent.calls
        calls[call] = calls.get(call, 0) + len(arguments)
        stream.sink.tool_call(call, call_id, name, arguments)

    def on_degraded(self, stream: GenerationStream, reason: str) -> None:
        """Records a fallback of a stream, once per reason."""
        if reason not in stream.degraded and stream.slot in self._streams:
            stream.degraded += (reason,)
            self._metrics.degraded(reason)
            if stream.span is not None:
                stream.span.add_event("degraded", {"reason": reason})

    def on_finished(self, stream: GenerationStream, finish: Finish) -> None:
        """Finishes a stream after its last text; stops the engine if postprocess detected the end."""
        stream.completion_tokens = finish.completion_tokens
        stream.reasoning_tokens = finish.reasoning_tokens
        self._end(stream, StreamEnd(finish))

    def on_text_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """Handles the failure of a stream on its postprocess replica."""
        if not self.texts.on_refused(stream, error):
            self.give_up(stream, error)

    def on_post_connected(self, link: PostLink) -> None:
        """Opens waiting streams on a newly connected postprocess replica."""
        self.texts.on_connected()

    def on_post_leaves(self, link: PostLink) -> None:
        """Moves the streams of a draining postprocess replica to others."""
        self.texts.drain(link)

    def on_post_lost(self, link: PostLink, error: SluiceError) -> None:
        """Moves the streams of a lost postprocess session to other replicas."""
        self.texts.on_lost(link, error)

    # --- ends ---

    @shared_step("gateway.sweep_stalled")
    def sweep_stalled(self) -> None:
        """Fails every stream without text or tokens since the last sweep, or with more tokens than requested."""
        for stream in list(self._streams.values()):
            silent = not stream.active and len(stream.tokens) == stream.tokens_at_last_sweep
            if silent or len(stream.tokens) > stream.max_tokens:
                stalled = SluiceError(
                    ErrorKind.RESPONSE_TIMEOUT, "The worker has stopped responding.", code="stalled", retryable=False
                )
                self.give_up(stream, stalled)
            stream.active, stream.tokens_at_last_sweep = False, len(stream.tokens)

    def sweep_overrun(self) -> None:
        """Fails every stream whose worker exceeds `max_tokens`, where no postprocess replica enforces the limit."""
        for stream in [one for one in self._streams.values() if len(one.tokens) > one.max_tokens]:
            if stream.request.engine_text:
                self.give_up(stream, internal("The worker sent more tokens than were requested."))

    def give_up(self, stream: GenerationStream, error: SluiceError) -> None:
        """Ends a stream with an error; does nothing if it has already ended."""
        self._end(stream, StreamEnd(error=error))

    def _end(self, stream: GenerationStream, end: StreamEnd) -> None:
        """Ends a stream: releases everything it holds, notifies the observers and the sink. Only the first call counts.

        The sink is detached, which breaks the reference cycle between sink and stream.
        """
        if self._streams.pop(stream.slot, None) is None:
            return
        worker, post, sink = stream.worker, stream.post, stream.detach_sink()
        if stream.memory is not None:
            stream.memory.release()
        try:
            self._release(stream)
            if worker is not None and stream.end is None:
                worker.cancel(stream.slot)
            if post is not None and end.finish is None:
                post.close_stream(stream.slot)
            for observer in self._observers:
                observer.on_ended(stream, end)
            stream.end_spans(end.error)
        except Exception as failure:
            log.error("recording the end of a stream failed", extra={"request": stream.request_id}, exc_info=failure)
        try:
            if end.error is not None:
                sink.fail(end.error)
            elif end.finish is not None:
                sink.finish(_with_outcome(end.finish, stream))
        except Exception as failure:
            log.error("ending a stream failed", extra={"request": stream.request_id}, exc_info=failure)
            if end.finish is not None:
                _fail(sink, stream)

    def _isolated(self, stream: GenerationStream, job: Callable[[GenerationStream], None]) -> None:
        """Runs a job for one stream; an exception fails only this stream."""
        try:
            job(stream)
        except Exception:
            log.exception("moving a stream failed", extra={"request_id": stream.request_id})
            self.give_up(stream, _internal_failure())

    def give_up_all(self, error: SluiceError) -> None:
        """Fails all streams."""
        for stream in list(self._streams.values()):
            self.give_up(stream, error)

    def _release(self, stream: GenerationStream) -> None:
        """Releases what a stream holds: its worker, its reservation, its replica, its timer and its task."""
        self.texts.remove(stream)
        if stream.expiry is not None:
            stream.expiry.cancel()
        if stream.migration_task is not None:
            stream.migration_task.cancel()
            stream.migration_task = None
        self.release_worker(stream)

    def release_worker(self, stream: GenerationStream) -> None:
        """Detaches a stream from its worker and releases its reservation."""
        worker, stream.worker = stream.worker, None
        if worker is not None:
            worker.release(stream)
        reservation_id, stream.reservation_id = stream.reservation_id, ""
        if reservation_id:
            output = max(stream.completion_tokens, len(stream.tokens)) - stream.booked_from
            (stream.reservations or self._reservations).free(reservation_id, stream.attempt_cached, output)


def _note_cached(stream: GenerationStream, cached_tokens: int, first: bool) -> None:
    """Records the number of cached tokens, which an engine reports with its first tokens or only at the end.

    Args:
        first: whether it comes from the stream's first worker.
    """
    stream.attempt_cached = min(cached_tokens, stream.prompt_tokens + stream.resumed)
    if first:
        stream.cached_tokens = min(cached_tokens, stream.prompt_tokens)


def _with_outcome(finish: Finish, stream: GenerationStream) -> Finish:
    """Returns the finish with the stream's fallbacks, and without a stop token that the client did not request."""
    if finish.stop_token_id is not None and not stream.is_requested_stop(finish.stop_token_id):
        finish = replace(finish, stop_token_id=None)
    if stream.degraded or stream.migrations:
        finish = replace(finish, degraded=stream.degraded, migrations=stream.migrations)
    if (receipt := stream.receipt) is not None:
        finish = replace(finish, receipt=receipt)
    return finish


def _fail(sink: Sink, stream: GenerationStream) -> None:
    try:
        sink.fail(_internal_failure())
    except Exception as error:
        log.error("failing a stream failed", extra={"request": stream.request_id}, exc_info=error)


def _mark_active(stream: GenerationStream) -> None:
    stream.active = True
    stream.first_text_at = stream.first_text_at or perf_counter()


def _internal_failure() -> SluiceError:
    return internal("The gateway failed to process this request; see its log for details.")


def shutting_down() -> SluiceError:
    """Returns the error for requests that do not finish before the gateway stops."""
    return unavailable("The gateway is shutting down; retry the request.", code=SHUTTING_DOWN)
