"""The generations in progress: their number, what they hold, and their ends.

However a stream ends, what it holds is released and its sink receives the end, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.common.base.errors import SHUTTING_DOWN, ErrorKind, SluiceError, internal, overloaded, unavailable
from services.common.base.shared_steps import shared_step
from services.gateway.core.request import NULL_SINK, Finish, Reservations, Route, Sink
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.generation_metrics import GenerationMetrics
from services.gateway.streams.interfaces import CANCELLED, StreamEnd, StreamObserver
from services.gateway.streams.postprocess_pool import PostprocessPool
from services.gateway.streams.states import StreamState
from services.gateway.streams.stream import Attempt, GenerationStream, WorkerStart

log = logging.getLogger(__name__)

MAX_STREAMS = 4096
"""Concurrent generations of a gateway; more are rejected with 503."""
POST_WAIT_S = 10.0
"""Longest wait of a stream for a postprocess replica while none is available, seconds."""


class RunningStreams:
    """All streams of this process that have not ended.

    Args:
        max_streams: maximum number of streams; more are refused with OVERLOADED.
        reservations: receives the outcomes of reservations whose route does not name another.
        post_wait_s: how long a stream waits for a postprocess replica.
        observers: notified of the start and the end of every stream, in addition to the metrics.

    Attributes:
        texts: the postprocess replicas.
    """

    def __init__(
        self,
        max_streams: int,
        reservations: Reservations,
        metrics: GatewayMetrics,
        post_wait_s: float = POST_WAIT_S,
        observers: Sequence[StreamObserver] = (),
    ) -> None:
        self._max_streams = max_streams
        self._reservations = reservations
        self._metrics = metrics
        self._observers: Sequence[StreamObserver] = (GenerationMetrics(), *observers)
        self._streams: dict[int, GenerationStream] = {}
        self._expected = 0
        self.texts = PostprocessPool(self.give_up, self.degrade, self.isolated, metrics, post_wait_s)

    @property
    def live(self) -> int:
        """Number of streams in progress."""
        return len(self._streams)

    def choices(self, stream: GenerationStream) -> list[GenerationStream]:
        """Returns the running streams of the same request."""
        if stream.request.choices == 1:
            return [stream]
        return [other for other in self._streams.values() if other.request is stream.request]

    def admit(self, choices: int) -> None:
        """Raises SluiceError(OVERLOADED) if `choices` more streams would exceed the limit."""
        running = len(self._streams) + self._expected
        if running + choices > self._max_streams:
            raise overloaded(
                f"The gateway has reached its limit of concurrent generations ({running}); try again later."
            )

    def book(self, stream: GenerationStream, route: Route, decode: WorkerStart | None = None) -> None:
        """Gives a stream the reservation of a route, which is released when the stream moves or ends.

        Args:
            decode: how the decode worker of a pair will start; None: one worker runs the stream.
        """
        stream.attempt = Attempt(route, route.reservations or self._reservations, len(stream.tokens), decode)

    def degrade(self, stream: GenerationStream, reason: str) -> None:
        """Records a fallback of a stream, once per reason."""
        if reason not in stream.degraded and stream.state is not StreamState.ENDED:
            stream.degraded += (reason,)
            self._metrics.degraded(reason)
            if stream.span is not None:
                stream.span.add_event("degraded", {"reason": reason})

    def isolated(self, stream: GenerationStream, job: Callable[[GenerationStream], None]) -> None:
        """Runs a job for one stream; an exception fails only this stream."""
        try:
            job(stream)
        except Exception:
            log.exception("moving a stream failed", extra={"request_id": stream.request_id})
            self.give_up(stream, internal_failure())

    def suspend(self, stream: GenerationStream) -> None:
        """Takes a stream from its worker, and releases its reservation, until it is resumed elsewhere."""
        stream.leave_worker(StreamState.MOVING)
        self._free(stream)

    def cancel(self, stream: GenerationStream) -> None:
        """Cancels a stream whose client has disconnected; its sink is not called again."""
        self.end(stream, CANCELLED)

    def give_up(self, stream: GenerationStream, error: SluiceError) -> None:
        """Ends a stream with an error; does nothing if it has already ended."""
        self.end(stream, StreamEnd(error=error))

    def end(self, stream: GenerationStream, end: StreamEnd) -> None:
        """Ends a stream: releases everything it holds, notifies the observers and the sink. Only the first call counts.

        The sink is detached, which breaks the reference cycle between sink and stream.
        """
        if stream.state is StreamState.ENDED:
            return
        worker, post, sink = stream.worker, stream.post, stream.sink
        stream.leave_worker(StreamState.ENDED)
        stream.sink = NULL_SINK
        self._streams.pop(stream.slot, None)
        if stream.memory is not None:
            stream.memory.release()
        try:
            self.texts.remove(stream)
            if stream.expiry is not None:
                stream.expiry.cancel()
            if stream.migration_task is not None:
                stream.migration_task.cancel()
                stream.migration_task = None
            self._free(stream)
            if worker is not None:
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

    def _free(self, stream: GenerationStream) -> None:
        """Releases the reservation of a stream, if it has one."""
        attempt = stream.attempt
        if attempt is None or not attempt.reserved:
            return
        attempt.reserved = False
        if attempt.route.reservation_id:
            output = max(stream.completion_tokens, len(stream.tokens)) - attempt.first_token
            attempt.reservations.free(attempt.route.reservation_id, attempt.cached_tokens, output)

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

    def give_up_all(self, error: SluiceError) -> None:
        """Fails all streams."""
        for stream in list(self._streams.values()):
            self.give_up(stream, error)


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
        sink.fail(internal_failure())
    except Exception as error:
        log.error("failing a stream failed", extra={"request": stream.request_id}, exc_info=error)


def internal_failure() -> SluiceError:
    """Returns the error of a stream that an exception in this process has ended."""
    return internal("The gateway failed to process this request; see its log for details.")


def shutting_down() -> SluiceError:
    """Returns the error for requests that do not finish before the gateway stops."""
    return unavailable("The gateway is shutting down; retry the request.", code=SHUTTING_DOWN)
