"""Every generation under way: what workers say of it, what postprocess makes of it, and how it ends.

Tokens take the path of `token_path`; everything else that is said of a stream comes through here.
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

from services.common.errors import ErrorKind, SluiceError, internal, overloaded, unavailable
from services.common.observability import telemetry
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core import deadlines
from services.gateway.core.deadlines import NO_DEADLINE, Deadline
from services.gateway.core.request import (
    DisaggregationPart,
    Finish,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    Role,
    Route,
    Sink,
    TokenizedPrompt,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.postprocess_pool import PostprocessPool
from services.gateway.streams.stream import EngineEnd, GenerationStream, Pair
from services.gateway.streams.token_forwarder import TokenForwarder

log = logging.getLogger(__name__)

POST_WAIT_S = 10.0


class StreamManager:
    """Every generation under way in this process.

    Args:
        max_streams: bound; more are refused with OVERLOADED.
        prefill_complete: told once per booking, with its reservation, when the prompt is computed.
        free: told once per booking, when it is over, with its reservation, the tokens of the prompt the worker had
            cached (None: it never started) and the length of its output.
        post_wait_s: how long a stream waits for a postprocess replica.

    Attributes:
        texts: where text is made.
        path: what tokens take.
        migrate: asked when a worker cannot go on with a stream, with the reason; True when it sees to the rest:
            `resume` or `give_up`, some time later.
        hand_over: told what a prefill worker hands over.
        rescue: asked first when a pair of workers breaks: None when it saw to it, else the error to go on with.
    """

    def __init__(
        self,
        max_streams: int,
        prefill_complete: Callable[[str], None],
        free: Callable[[str, int | None, int], None],
        metrics: GatewayMetrics,
        post_wait_s: float = POST_WAIT_S,
    ) -> None:
        self._max_streams = max_streams
        self._prefill_complete = prefill_complete
        self._free = free
        self._metrics = metrics
        self._slots = count(1)
        self._expected = 0
        self._streams: dict[int, GenerationStream] = {}
        self.texts = PostprocessPool(self.give_up, self.on_degraded, self._guarded, metrics, post_wait_s)
        self.path = TokenForwarder(self.texts)
        self.migrate: Callable[[GenerationStream, WorkerLink, SluiceError], bool] = lambda stream, worker, error: False
        self.hand_over: Callable[[GenerationStream, bytes], None] = lambda stream, handoff: None
        self.rescue: Callable[[GenerationStream, WorkerLink, SluiceError], SluiceError | None] = (
            lambda stream, worker, error: error
        )

    @property
    def live(self) -> int:
        """Streams under way."""
        return len(self._streams)

    def computing(self, worker: WorkerLink) -> bool:
        """Whether a worker has a generation that it is not done with."""
        return bool(worker.streams)

    def admit(self, choices: int) -> None:
        """SluiceError(OVERLOADED) when `choices` more streams would be over the bound."""
        running = len(self._streams) + self._expected
        if running + choices > self._max_streams:
            raise overloaded(f"The gateway runs {running} generations, its limit; try again soon.")

    @contextmanager
    def expecting(self, choices: int) -> Iterator[None]:
        """As `admit`, and the places are kept while the streams are on their way: many may come at the same time."""
        self.admit(choices)
        self._expected += choices
        try:
            yield
        finally:
            self._expected -= choices

    # --- from the pipeline ---

    def connect(
        self,
        request: GenerationRequest,
        index: int,
        prompt: TokenizedPrompt,
        route: Route,
        worker: WorkerLink,
        max_tokens: int,
        sink: Sink,
        deadline: Deadline = NO_DEADLINE,
        prefill: WorkerLink | None = None,
    ) -> GenerationStream:
        """Starts choice `index` of a request: from now on its text goes to the sink.

        Args:
            worker: who answers.
            prefill: who computes the prompt for it; None: the worker does all.
        """
        slot = next(self._slots) & 0xFFFFFFFF
        stream = GenerationStream(slot, request, index, prompt, max_tokens, sink, deadline)
        stream.span = telemetry.start_span(
            "gateway.generate", request_id=stream.request_id, worker=worker.worker_id, choice=index
        )
        self._streams[slot] = stream
        if deadline.at != inf:
            stream.expiry = asyncio.get_running_loop().call_at(deadline.at, self.give_up, stream, deadlines.overdue())
        self._book(stream, route, worker, prefill, stream.request_id)
        if slot not in self._streams:  # it could not be started
            return stream
        if request.engine_text:
            self.texts.keep_apart(stream)
        else:
            (self.texts.open if prompt.raw is None else self.texts.hold)(stream)
        return stream

    def resume(
        self, stream: GenerationStream, route: Route, worker: WorkerLink, prefill: WorkerLink | None = None
    ) -> None:
        """Goes on with a stream on another worker, or pair of workers, after the tokens it has."""
        stream.migration_task = None
        self._book(stream, route, worker, prefill, f"{stream.request_id}-m{stream.migrations}")

    def _book(
        self, stream: GenerationStream, route: Route, worker: WorkerLink, prefill: WorkerLink | None, name: str
    ) -> None:
        for mark in (route.degraded, route.split_skipped):
            if mark:
                self.on_degraded(stream, mark)
        stream.attach(prefill or worker, route)
        if prefill is None:
            self._start(stream, worker, route.rank, name, stream.resumed, None)
            return
        stream.pair = Pair(worker, route.rank, name, stream.resumed)
        self._start(stream, prefill, route.prefill_rank, name, stream.resumed, DisaggregationPart(Role.PREFILL))

    def go_on(
        self,
        stream: GenerationStream,
        worker: WorkerLink,
        rank: int | None,
        name: str,
        resumed: int,
        part: DisaggregationPart | None,
    ) -> None:
        """Starts another worker of the same booking, with the first `resumed` tokens."""
        stream.shift(worker)
        self._start(stream, worker, rank, name, resumed, part)

    def _start(
        self,
        stream: GenerationStream,
        worker: WorkerLink,
        rank: int | None,
        name: str,
        resumed: int,
        part: DisaggregationPart | None,
    ) -> None:
        if not worker.connected:  # gone since it was chosen; a start would wait for a session that may never come
            gone = SluiceError(ErrorKind.CANNOT_CONNECT, f"The {worker.peer} cannot be reached.")
            self.interrupted(stream, gone)
            return
        request = stream.request
        if stream.computed and request.prompt_logprobs is not None:  # the sink has them
            request = replace(request, prompt_logprobs=None)
        try:
            worker.start(
                stream.slot,
                name,
                request,
                stream.prompt,
                stream.seed,
                stream.max_tokens,
                rank,
                telemetry.trace_context(stream.current_span),
                stream.tokens[:resumed],
                part,
            )
        except SluiceError as error:
            self.interrupted(stream, error)

    def cancel(self, stream: GenerationStream) -> None:
        """The client is gone: engine and postprocess forget the stream, the sink hears nothing more."""
        worker, post = stream.worker, stream.post
        if self._forget(stream):
            stream.part()
            self._stop(stream, worker, post)
            self._metrics.cancelled(stream.model)
            stream.end_spans(gone=True)

    # --- from workers ---

    def on_tokens(self, link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Keeps the tokens of a link's own streams and passes their columns on to their postprocess sessions.

        Raises:
            ValueError: the columns do not fit together.
        """
        self.path.pass_on(link, slots, counts, token_ids)

    def on_prompt(self, stream: GenerationStream, token_ids: bytes) -> None:
        """A worker made a prompt's ids, so the tokens that the text of the answer follows on are known."""
        if stream.prompt.raw is None:
            return
        stream.learn_prompt(token_ids)
        if not stream.request.engine_text:
            self.texts.open(stream)

    def on_logprobs(self, stream: GenerationStream, positions: list[PositionLogprobs]) -> None:
        """Log-probabilities of the next tokens of a stream, before the tokens' text."""
        stream.take_logprobs(positions)
        stream.sink.logprobs(positions)

    def on_prompt_logprobs(self, stream: GenerationStream, positions: list[PositionLogprobs]) -> None:
        """Log-probabilities of a stream's prompt."""
        stream.take_prompt_logprobs(positions)
        stream.sink.prompt_logprobs(positions)

    def on_started(self, stream: GenerationStream, cached_tokens: int) -> None:
        """The prompt of a stream is computed; counts once per worker that computes it."""
        if stream.worker is not None:
            stream.worker.breaker.succeeded()
        if stream.prompt.raw is not None:
            self.give_up(stream, internal("The worker made a prompt and did not send its token ids."))
            return
        if stream.attempt_cached is not None:
            return  # already reported, by the prefill worker if a pair works on the stream
        cached_tokens = min(cached_tokens, stream.prompt_tokens + stream.resumed)
        if not stream.computed:
            stream.cached_tokens = min(cached_tokens, stream.prompt_tokens)
        stream.computed = True
        stream.attempt_cached = cached_tokens
        if stream.reservation_id:
            self._prefill_complete(stream.reservation_id)

    def on_ended(
        self, stream: GenerationStream, reason: FinishReason, stop_token_id: int | None, completion_tokens: int
    ) -> None:
        """The engine is done; the rest of the text still comes from postprocess."""
        if reason is FinishReason.CANCELLED:
            self._leave_worker(stream)
            self.give_up(stream, SluiceError(ErrorKind.CANCELLED, "The generation was cancelled on its worker."))
            return
        stream.completion_tokens = min(stream.resumed + completion_tokens, stream.max_tokens)
        self._engine_done(stream, EngineEnd(reason, stop_token_id))

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """A prefill worker has done its part of a stream."""
        if stream.pair is None or stream.handed_over:
            self.interrupted(stream, internal("The worker handed a request over that it was to finish."))
        else:
            self.hand_over(stream, handoff)

    def _engine_done(self, stream: GenerationStream, end: EngineEnd) -> None:
        stream.end = end
        if stream.worker is not None:
            stream.worker.release(stream)  # nothing may follow the end
        if stream.post is not None:
            stream.post.end(stream.slot, *end)
        elif stream.request.engine_text:  # the end carried the last text
            self.on_finished(stream, Finish(end.reason, "", end.stop_token_id, stream.completion_tokens))

    def on_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """A worker could not finish a stream."""
        self.interrupted(stream, error)

    def on_broken(self, stream: GenerationStream, error: Exception) -> None:
        """Handling what a peer sent for a stream raised: this stream ends, and no other one does."""
        if isinstance(error, SluiceError):
            self.give_up(stream, error)
            return
        log.error("a stream failed in the gateway", extra={"request": stream.request_id}, exc_info=error)
        self.give_up(stream, _broken())

    def on_worker_lost(self, link: WorkerLink, error: SluiceError) -> None:
        """A worker's session is gone, and with it every generation on it that was not done."""
        for stream in list(link.streams.values()):
            self._guarded(stream, lambda lost: self.interrupted(lost, error))

    def interrupted(self, stream: GenerationStream, error: SluiceError) -> None:
        """The worker of a stream cannot go on with it."""
        worker = stream.worker
        if worker is None:
            return
        if error.retryable and len(stream.tokens) == stream.resumed:
            worker.breaker.failed()
        end = stream.known_end()
        if end is not None:  # only the worker's word that this was all is missing
            self._leave_worker(stream)
            stream.completion_tokens = len(stream.tokens)
            self._engine_done(stream, end)
            return
        unsolved = self.rescue(stream, worker, error)
        if unsolved is None:
            return
        self._leave_worker(stream)
        if not self.migrate(stream, worker, unsolved):
            self.give_up(stream, unsolved)

    # --- from postprocess ---

    def on_token_texts(self, stream: GenerationStream, pieces: list[bytes], offsets: Sequence[int]) -> None:
        """The bytes of a stream's next tokens, before their text."""
        stream.sent.tokens += len(pieces)
        stream.sink.tokens(pieces, offsets)

    def on_text(self, stream: GenerationStream, piece: str) -> None:
        """The next text of a stream."""
        stream.active = True
        stream.text_sent += len(piece)
        if not stream.first_text_at:
            stream.first_text_at = perf_counter()
        stream.sink.text(piece)

    def on_reasoning(self, stream: GenerationStream, piece: str) -> None:
        """The next reasoning of a stream."""
        _active(stream)
        stream.sent.reasoning += len(piece)
        stream.sink.reasoning(piece)

    def on_tool_call(self, stream: GenerationStream, call: int, call_id: str, name: str, arguments: str) -> None:
        """The next piece of a tool call of a stream."""
        _active(stream)
        calls = stream.sent.calls
        calls[call] = calls.get(call, 0) + len(arguments)
        stream.sink.tool_call(call, call_id, name, arguments)

    def on_degraded(self, stream: GenerationStream, reason: str) -> None:
        """A stream goes on with a fallback."""
        if reason not in stream.degraded and stream.slot in self._streams:
            stream.degraded += (reason,)
            self._metrics.degraded(reason)
            if stream.span is not None:
                stream.span.add_event("degraded", {"reason": reason})

    def on_finished(self, stream: GenerationStream, finish: Finish) -> None:
        """Postprocess has sent everything; when it found the end itself, the engine is stopped."""
        worker = stream.worker
        stream.completion_tokens = finish.completion_tokens
        stream.reasoning_tokens = finish.reasoning_tokens
        if not self._forget(stream):
            return
        try:
            self._stop(stream, worker, None)
            self._metrics.finished(stream, perf_counter())
            stream.end_spans()
            if finish.stop_token_id is not None and not stream.asked_to_end_at(finish.stop_token_id):
                finish = replace(finish, stop_token_id=None)
            if stream.degraded or stream.migrations:
                finish = replace(finish, degraded=stream.degraded, migrations=stream.migrations)
            stream.sink.finish(finish)
            stream.part()
        except Exception as error:
            log.error("an answer could not be finished", extra={"request": stream.request_id}, exc_info=error)
            self._fail_sink(stream, _broken())

    def on_text_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """A replica could not make the text of a stream."""
        if not self.texts.refused(stream, error):
            self.give_up(stream, error)

    def on_post_connected(self, link: PostLink) -> None:
        """A replica takes streams."""
        self.texts.connected(link)

    def on_post_leaves(self, link: PostLink) -> None:
        """A replica asks for its streams to be moved to others."""
        self.texts.leave(link)

    def on_post_lost(self, link: PostLink, error: SluiceError) -> None:
        """A postprocess session is gone: its streams go on elsewhere."""
        self.texts.lost(link, error)

    # --- ends ---

    def sweep_stalled(self) -> None:
        """Fails every stream without text or a token since the last sweep, or whose worker knows no end."""
        for stream in list(self._streams.values()):
            silent = not stream.active and len(stream.tokens) == stream.tokens_at_last_sweep
            if silent or len(stream.tokens) > stream.max_tokens:
                stalled = SluiceError(
                    ErrorKind.RESPONSE_TIMEOUT, "The worker has stopped answering.", code="stalled", retryable=False
                )
                self.give_up(stream, stalled)
            stream.active, stream.tokens_at_last_sweep = False, len(stream.tokens)

    def sweep_overrun(self) -> None:
        """Fails every stream whose worker generates more than was requested and whose text no service bounds."""
        for stream in [one for one in self._streams.values() if len(one.tokens) > one.max_tokens]:
            if stream.request.engine_text:
                self.give_up(stream, internal("The worker sent more tokens than were requested."))

    def give_up(self, stream: GenerationStream, error: SluiceError) -> None:
        """A stream cannot go on; one that is over already stays as it is."""
        worker, post = stream.worker, stream.post
        if not self._forget(stream):
            return
        self._stop(stream, worker, post)
        self._metrics.failed(stream.model, error)
        stream.end_spans(error)
        self._fail_sink(stream, error)

    def _fail_sink(self, stream: GenerationStream, error: SluiceError) -> None:
        try:
            stream.part().fail(error)
        except Exception as broken:
            log.error("an answer could not be failed", extra={"request": stream.request_id}, exc_info=broken)

    def _guarded(self, stream: GenerationStream, job: Callable[[GenerationStream], None]) -> None:
        """What goes wrong with one stream is no reason for the others to be left."""
        try:
            job(stream)
        except Exception:
            log.exception("a stream could not be moved", extra={"request_id": stream.request_id})
            self.give_up(stream, _broken())

    def give_up_all(self, error: SluiceError) -> None:
        """Ends everything under way."""
        for stream in list(self._streams.values()):
            self.give_up(stream, error)

    def _forget(self, stream: GenerationStream) -> bool:
        """Drops a stream and gives its reservation back; False when that has happened already."""
        if self._streams.pop(stream.slot, None) is None:
            return False
        self._leave_worker(stream)
        self.texts.forget(stream)
        if stream.expiry is not None:
            stream.expiry.cancel()
        if stream.migration_task is not None:
            stream.migration_task.cancel()
            stream.migration_task = None
        return True

    def _leave_worker(self, stream: GenerationStream) -> None:
        """The stream's booking on its worker is over."""
        worker, stream.worker = stream.worker, None
        if worker is not None:
            worker.release(stream)
        reservation_id, stream.reservation_id = stream.reservation_id, ""
        if reservation_id:
            output = max(stream.completion_tokens, len(stream.tokens)) - stream.booked_from
            self._free(reservation_id, stream.attempt_cached, output)

    @staticmethod
    def _stop(stream: GenerationStream, worker: WorkerLink | None, post: PostLink | None) -> None:
        """Stops the work on a stream that is over."""
        if worker is not None and stream.end is None:
            worker.cancel(stream.slot)
        if post is not None:
            post.close_stream(stream.slot)


def _active(stream: GenerationStream) -> None:
    stream.active = True
    stream.first_text_at = stream.first_text_at or perf_counter()


def _broken() -> SluiceError:
    return internal("The gateway could not go on with this request; its log has the details.")


def shutting_down() -> SluiceError:
    """What clients hear whose answers take longer than a gateway that stops has time."""
    return unavailable("The gateway is shutting down; ask again.", code="shutting_down")
