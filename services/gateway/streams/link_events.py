"""Handles what the links to workers and postprocess replicas deliver for the streams.

Tokens are forwarded by `token_forwarder`. An event is dropped if an earlier one has taken the stream from its worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.common.base.shared_steps import shared_step
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.request import Finish, FinishReason, PositionLogprobs
from services.gateway.streams.interfaces import StreamEnd
from services.gateway.streams.running import RunningStreams, internal_failure
from services.gateway.streams.states import StreamState
from services.gateway.streams.stream import EngineEnd, GenerationStream
from services.gateway.streams.token_forwarder import TokenForwarder

log = logging.getLogger(__name__)


class LinkEvents:
    """Implements WorkerEvents and TextEvents; what is not described here is described there.

    Attributes:
        on_tokens: stores the tokens of a link's streams and forwards their columns; see TokenForwarder.
    """

    def __init__(self, streams: RunningStreams) -> None:
        self._streams = streams
        self._texts = streams.texts
        self.give_up = streams.give_up
        self.on_degraded = streams.degrade
        self.on_tokens = TokenForwarder(streams.texts).forward

    # --- from workers ---

    def on_prompt(self, stream: GenerationStream, token_ids: bytes) -> None:
        """Takes the token ids of a prompt that the worker tokenized, and opens the deferred postprocess stream."""
        if stream.prompt.raw is None or stream.worker is None:
            return
        stream.set_prompt_ids(token_ids)
        if not stream.request.engine_text:
            self._texts.open(stream)

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
        attempt = stream.attempt
        if stream.worker is None or attempt is None:
            return
        stream.worker.breaker.succeeded()
        if stream.prompt.raw is not None and not stream.request.text_only:
            self.give_up(stream, internal("The worker tokenized the prompt but did not send its token ids."))
            return
        if attempt.prefilled:
            return  # reported by the prefill worker of its pair
        attempt.prefilled = True
        if cached_tokens is not None:
            stream.note_cached(cached_tokens, first=not stream.computed)
        stream.computed = True
        if attempt.route.reservation_id:
            attempt.reservations.prefill_complete(attempt.route.reservation_id)

    def on_ended(
        self,
        stream: GenerationStream,
        reason: FinishReason,
        stop_token_id: int | None,
        completion_tokens: int,
        cached_tokens: int | None = None,
    ) -> None:
        """Handles the end of the engine's work; postprocess still sends the remaining text."""
        attempt = stream.attempt
        if stream.worker is None or attempt is None:
            return
        known = attempt.cached_tokens
        alone = stream.state is StreamState.RUNNING
        if cached_tokens is not None and alone and (known is None or cached_tokens > known):
            stream.note_cached(cached_tokens, first=not stream.resumed)
        if reason is FinishReason.CANCELLED:
            self._fail(stream, SluiceError(ErrorKind.CANCELLED, "The generation was cancelled on its worker."))
            return
        stream.completion_tokens = min(stream.resumed + completion_tokens, stream.max_tokens)
        self._finish_engine(stream, EngineEnd(reason, stop_token_id))

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """Passes the handoff of a prefill worker to its pair's decode worker."""
        if stream.state is StreamState.PREFILLING:
            stream.recovery.on_handoff(stream, handoff)
        else:
            self.on_failed(stream, internal("The worker sent a handoff for a request that it was to finish."))

    def _finish_engine(self, stream: GenerationStream, end: EngineEnd) -> None:
        stream.leave_worker(StreamState.ENGINE_DONE)
        stream.end = end
        if stream.post is not None:
            stream.post.end(stream.slot, *end)
        elif stream.request.engine_text:  # the last text has arrived together with the end
            calls = stream.request.text_only and stream.sent.calls and end.reason is FinishReason.STOP
            reason = FinishReason.TOOL_CALLS if calls else end.reason
            self.on_finished(stream, Finish(reason, "", end.stop_token_id, stream.completion_tokens))

    def _fail(self, stream: GenerationStream, error: SluiceError) -> None:
        """Ends a stream with an error after the end of its worker's work, which need not be cancelled."""
        stream.leave_worker(StreamState.ENGINE_DONE)
        self.give_up(stream, error)

    def on_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """Finishes, recovers or fails a stream whose worker cannot continue it."""
        worker = stream.worker
        if worker is None:
            return
        if error.retryable and len(stream.tokens) == stream.resumed:
            worker.breaker.failed()
        end = stream.known_end()
        if end is not None:  # complete: only the worker's end message is missing
            stream.completion_tokens = len(stream.tokens)
            self._finish_engine(stream, end)
            return
        remaining_error = stream.recovery.on_interrupted(stream, worker, error)
        if remaining_error is not None:
            self._fail(stream, remaining_error)

    def on_broken(self, stream: GenerationStream, error: Exception) -> None:
        """Fails only this stream after an exception while handling its events."""
        if isinstance(error, SluiceError):
            self.give_up(stream, error)
            return
        log.error("handling a stream failed", extra={"request": stream.request_id}, exc_info=error)
        self.give_up(stream, internal_failure())

    @shared_step("gateway.worker_lost")
    def on_worker_lost(self, link: WorkerLink, error: SluiceError) -> None:
        """Handles the loss of a worker's session, which interrupts all of its generations."""
        for stream in list(link.streams.values()):
            self._streams.isolated(stream, lambda lost: self.on_failed(lost, error))

    # --- from postprocess, or from the worker where its engine makes the text ---

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

    def on_finished(self, stream: GenerationStream, finish: Finish) -> None:
        """Finishes a stream after its last text; stops the engine if postprocess detected the end."""
        stream.completion_tokens = finish.completion_tokens
        stream.reasoning_tokens = finish.reasoning_tokens
        self._streams.end(stream, StreamEnd(finish))

    def on_text_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """Handles the failure of a stream on its postprocess replica."""
        if stream.state is not StreamState.ENDED and not self._texts.on_refused(stream, error):
            self.give_up(stream, error)

    def on_post_connected(self, link: PostLink) -> None:
        """Opens waiting streams on a newly connected postprocess replica."""
        self._texts.on_available()

    def on_post_leaves(self, link: PostLink) -> None:
        """Moves the streams of a draining postprocess replica to others."""
        self._texts.drain(link)

    def on_post_lost(self, link: PostLink, error: SluiceError) -> None:
        """Moves the streams of a lost postprocess session to other replicas."""
        self._texts.on_lost(link, error)


def _mark_active(stream: GenerationStream) -> None:
    stream.active = True
    stream.first_text_at = stream.first_text_at or perf_counter()
