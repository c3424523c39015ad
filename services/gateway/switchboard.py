"""The token path: worker batches → postprocess sessions → the sinks of the clients.

One slot number names a stream on its worker's session and on its postprocess session alike, so a batch of token
columns is passed on as it came. Nothing here costs anything per token: a batch costs a few microseconds, whatever is
in it, and only text that has somewhere to go touches its stream.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter

from opentelemetry.trace import Span

from services.common import telemetry
from services.common.errors import ErrorKind, SluiceError, overloaded
from services.common.packing import pack_u32, unpack_u32
from services.gateway.clients.post_link import PostLink
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    Route,
    Sink,
    Tokenized,
)
from services.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)


class LiveStream:
    """One choice under way."""

    __slots__ = (
        "active",
        "cached_tokens",
        "completion_tokens",
        "computed",
        "degraded",
        "engine_done",
        "first_text_at",
        "model",
        "post",
        "prompt_tokens",
        "reasoning_tokens",
        "reservation_id",
        "sink",
        "slot",
        "span",
        "started_at",
        "worker",
    )

    def __init__(self, slot: int, sink: Sink, worker: WorkerLink, post: PostLink, route: Route) -> None:
        self.slot = slot
        self.sink = sink
        self.worker = worker
        self.post = post
        self.reservation_id = route.reservation_id
        self.model = ""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.degraded: tuple[str, ...] = ()
        self.computed = False  # its prompt
        self.engine_done = False
        self.active = True  # said something since the last sweep
        self.started_at = perf_counter()
        self.first_text_at = 0.0
        self.span: Span | None = None


class Switchboard:
    """Every generation under way in this process.

    Args:
        max_streams: bound; more are refused with OVERLOADED.
        prefill_complete: told once per stream, with its reservation, when its prompt is computed.
        free: told once per stream, when it is over, with its reservation, the tokens of its prompt the worker had
            cached (None: it never started) and the length of its output.
    """

    def __init__(
        self,
        max_streams: int,
        prefill_complete: Callable[[str], None],
        free: Callable[[str, int | None, int], None],
        metrics: GatewayMetrics,
    ) -> None:
        self._max_streams = max_streams
        self._prefill_complete = prefill_complete
        self._free = free
        self._metrics = metrics
        self._slots = count(1)
        self._streams: dict[int, LiveStream] = {}
        self.post_links: dict[str, PostLink] = {}

    @property
    def live(self) -> int:
        """Streams under way."""
        return len(self._streams)

    def admit(self, choices: int) -> None:
        """SluiceError(OVERLOADED) when `choices` more streams would be over the bound."""
        if len(self._streams) + choices > self._max_streams:
            raise overloaded(f"The gateway runs {len(self._streams)} generations, its limit; try again soon.")

    def connect(
        self,
        request: GenerationRequest,
        index: int,
        prompt: Tokenized,
        route: Route,
        worker: WorkerLink,
        post: PostLink,
        max_tokens: int,
        sink: Sink,
    ) -> LiveStream:
        """Starts choice `index` of a request: from now on its text goes to the sink."""
        slot = next(self._slots) & 0xFFFFFFFF
        stream = LiveStream(slot, sink, worker, post, route)
        stream.model = request.model
        stream.prompt_tokens = prompt.length
        stream.span = telemetry.start_span("gateway.generate", worker=worker.worker_id, choice=index)
        trace = telemetry.trace_context(stream.span)
        self._streams[slot] = stream
        worker.live += 1
        post.live += 1
        request_id = f"{request.request_id}-{index}"
        seed = request.sampling.seed
        post.open(slot, request_id, request, prompt, trace)
        worker.start(
            slot, request_id, request, prompt, None if seed is None else seed + index, max_tokens, route.rank, trace
        )
        return stream

    def cancel(self, stream: LiveStream) -> None:
        """The client is gone: engine and postprocess forget the stream, the sink hears nothing more."""
        if self._forget(stream):
            if not stream.engine_done:
                stream.worker.cancel(stream.slot)
            stream.post.close_stream(stream.slot)
            self._metrics.cancelled(stream.model)

    # --- from workers ---

    def on_tokens(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Passes token columns on to the postprocess sessions of their streams."""
        if len(self.post_links) == 1:
            for link in self.post_links.values():
                link.feed(slots, counts, token_ids)
            return
        streams = self._streams
        parts: dict[PostLink, tuple[array[int], array[int], bytearray]] = {}
        start = 0
        for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
            end = start + number * 4
            stream = streams.get(slot)
            if stream is not None:
                part = parts.get(stream.post)
                if part is None:
                    part = parts[stream.post] = (array("I"), array("I"), bytearray())
                part[0].append(slot)
                part[1].append(number)
                part[2].extend(token_ids[start:end])
            start = end
        for link, (link_slots, link_counts, link_ids) in parts.items():
            link.feed(pack_u32(link_slots), pack_u32(link_counts), bytes(link_ids))

    def on_logprobs(self, slot: int, positions: list[PositionLogprobs]) -> None:
        """Log-probabilities of the next tokens of a stream; comes before the tokens."""
        stream = self._streams.get(slot)
        if stream is not None:
            stream.sink.logprobs(positions)

    def on_prompt_logprobs(self, slot: int, positions: list[PositionLogprobs]) -> None:
        """Log-probabilities of a stream's prompt."""
        stream = self._streams.get(slot)
        if stream is not None:
            stream.sink.prompt_logprobs(positions)

    def on_started(self, slot: int, cached_tokens: int) -> None:
        """The prompt of a stream is computed."""
        stream = self._streams.get(slot)
        if stream is not None:
            stream.cached_tokens = cached_tokens
            stream.computed = True
            if stream.reservation_id:
                self._prefill_complete(stream.reservation_id)

    def on_ended(self, slot: int, reason: FinishReason, stop_token_id: int | None, completion_tokens: int) -> None:
        """The engine is done; postprocess still has to say the rest."""
        stream = self._streams.get(slot)
        if stream is None:
            return
        stream.engine_done = True
        if reason is FinishReason.CANCELLED:
            self.on_failed(slot, SluiceError(ErrorKind.CANCELLED, "The generation was cancelled on its worker."))
            return
        stream.completion_tokens = completion_tokens
        stream.post.end(slot, reason, stop_token_id)

    # --- from postprocess ---

    def on_token_texts(self, slot: int, pieces: list[bytes], offsets: Sequence[int]) -> None:
        """What the next tokens of a stream stand for; comes before their text."""
        stream = self._streams.get(slot)
        if stream is not None:
            stream.sink.tokens(pieces, offsets)

    def on_text(self, slot: int, piece: str) -> None:
        """The next text of a stream."""
        stream = self._streams.get(slot)
        if stream is not None:
            stream.active = True
            if not stream.first_text_at:
                stream.first_text_at = perf_counter()
            stream.sink.text(piece)

    def on_reasoning(self, slot: int, piece: str) -> None:
        """The next reasoning of a stream."""
        stream = self._spoken(slot)
        if stream is not None:
            stream.sink.reasoning(piece)

    def on_tool_call(self, slot: int, call: int, call_id: str, name: str, arguments: str) -> None:
        """The next piece of a tool call of a stream."""
        stream = self._spoken(slot)
        if stream is not None:
            stream.sink.tool_call(call, call_id, name, arguments)

    def on_degraded(self, slot: int, reason: str) -> None:
        """A stream goes on with a fallback."""
        stream = self._streams.get(slot)
        if stream is not None and reason not in stream.degraded:
            stream.degraded += (reason,)
            self._metrics.degraded(reason)
            if stream.span is not None:
                stream.span.add_event("degraded", {"reason": reason})

    def _spoken(self, slot: int) -> LiveStream | None:
        stream = self._streams.get(slot)
        if stream is not None:
            stream.active = True
            stream.first_text_at = stream.first_text_at or perf_counter()
        return stream

    def on_finished(self, slot: int, finish: Finish) -> None:
        """Postprocess has said everything; when it found the end itself, the engine is stopped."""
        stream = self._streams.get(slot)
        if stream is None:
            return
        stream.completion_tokens = finish.completion_tokens
        stream.reasoning_tokens = finish.reasoning_tokens
        self._forget(stream)
        if not stream.engine_done:
            stream.worker.cancel(slot)
        self._metrics.finished(stream, perf_counter())
        if stream.span is not None:
            stream.span.set_attribute("output_tokens", finish.completion_tokens)
            stream.span.end()
        stream.sink.finish(replace(finish, degraded=stream.degraded) if stream.degraded else finish)

    # --- failures ---

    def on_failed(self, slot: int, error: SluiceError) -> None:
        """One stream cannot go on."""
        stream = self._streams.get(slot)
        if stream is not None:
            self._fail(stream, error)

    def on_worker_lost(self, link: WorkerLink, error: SluiceError) -> None:
        """A worker's session is gone, and with it every generation on it."""
        for stream in [stream for stream in self._streams.values() if stream.worker is link]:
            stream.engine_done = True
            self._fail(stream, error)

    def on_post_lost(self, link: PostLink, error: SluiceError) -> None:
        """A postprocess session is gone, and with it the text of every stream on it."""
        for stream in [stream for stream in self._streams.values() if stream.post is link]:
            self._fail(stream, error)

    def sweep_stalled(self) -> None:
        """Fails every stream that has said nothing since the last sweep."""
        for stream in list(self._streams.values()):
            if not stream.active:
                self._fail(
                    stream, SluiceError(ErrorKind.RESPONSE_TIMEOUT, "The worker has stopped answering.", code="stalled")
                )
            stream.active = False

    def _fail(self, stream: LiveStream, error: SluiceError) -> None:
        if not self._forget(stream):
            return
        if not stream.engine_done:
            stream.worker.cancel(stream.slot)
        stream.post.close_stream(stream.slot)
        self._metrics.failed(stream.model, error)
        if stream.span is not None:
            telemetry.fail_span(stream.span, error.message)
            stream.span.end()
        stream.sink.fail(error)

    def _forget(self, stream: LiveStream) -> bool:
        """Drops a stream and gives its reservation back; False when that has happened already."""
        if self._streams.pop(stream.slot, None) is None:
            return False
        stream.worker.live -= 1
        stream.post.live -= 1
        if stream.reservation_id:
            cached = stream.cached_tokens if stream.computed else None
            self._free(stream.reservation_id, cached, stream.completion_tokens)
        return True
