"""The session to one worker: sends starts of generations and receives their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import grpc
import orjson

from services.common.budgets import Budget
from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.observability import telemetry
from services.common.packing import pack_u32
from services.common.rpc.errors import from_detail, passed_on
from services.gateway.clients.link import Link, take_within
from services.gateway.clients.postprocess_link import TextEvents, dispatch_event, dispatch_token_texts, stream_options
from services.gateway.core.request import (
    ChatPrompt,
    DisaggregationPart,
    EmbedsPrompt,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    SamplingParams,
    StopParams,
    StructuredOutput,
    TextPrompt,
    TokenizedPrompt,
    TokenLogprob,
)
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from services.gateway.streams.stream import GenerationStream

START_BYTES_PER_MESSAGE = 4 << 20
MAX_START_BYTES = 16 << 20
"""Default of the workers' --max-message-mb."""
TOKEN_BYTES = 4
BATCH_TOKENS = Budget("batch_tokens", 1 << 18, "--max-batch-tokens")
_START_OVERHEAD_BYTES = 64


class WorkerEvents(TextEvents, Protocol):
    """Handles the events of a worker's streams; text events only where the engine detokenizes."""

    def on_prompt(self, stream: GenerationStream, token_ids: bytes) -> None:
        """Receives the token ids, packed u32, of a prompt that the worker tokenized."""

    def on_tokens(self, link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Receives token columns of many streams, each packed u32; rows of slots not on the link are dropped."""

    def on_logprobs(self, stream: GenerationStream, positions: list[PositionLogprobs]) -> None:
        """Receives log-probabilities of the next tokens."""

    def on_prompt_logprobs(self, stream: GenerationStream, positions: list[PositionLogprobs]) -> None:
        """Receives log-probabilities of the prompt."""

    def on_started(self, stream: GenerationStream, cached_tokens: int) -> None:
        """Is notified that prefill has completed."""

    def on_ended(
        self,
        stream: GenerationStream,
        reason: FinishReason,
        stop_token_id: int | None,
        completion_tokens: int,
        cached_tokens: int,
    ) -> None:
        """Is notified that the engine has finished."""

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """Receives the handoff of a prefill worker for the decode worker."""

    def on_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        """Is notified that the worker failed to finish the stream."""


class WorkerLink(Link[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch]):
    """The session to one worker.

    Args:
        max_start_bytes: largest message that the worker accepts; a larger one would end the session.
        batch_tokens: maximum number of tokens in one message of the worker; exceeding it ends the session.

    Attributes:
        embedding: number of embedding calls in progress, which are separate from the session.
        keep: function that appends one token to its stream, by slot; most rows have one token.
    """

    def __init__(
        self,
        worker_id: str,
        address: str,
        channel: grpc.aio.Channel,
        connect_timeout_s: float,
        events: WorkerEvents,
        on_lost: Callable[[WorkerLink, SluiceError], None],
        max_start_bytes: int = MAX_START_BYTES,
        batch_tokens: Budget = BATCH_TOKENS,
        max_pause_s: float = 0.0,
    ) -> None:
        super().__init__(
            f"worker {worker_id}", channel, connect_timeout_s, lambda error: on_lost(self, error), max_pause_s
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
        self._starts: list[tuple[worker_pb2.SessionStart, int]] = []  # each with its size, bytes
        self._cancels: list[int] = []

    @property
    def live(self) -> int:
        """Number of streams and embedding calls on the worker."""
        return len(self.streams) + self.embedding

    def adopt(self, stream: GenerationStream) -> None:
        """Accepts messages of the worker for a stream."""
        super().adopt(stream)
        self.keep[stream.slot] = stream.tokens.append

    def release(self, stream: GenerationStream) -> None:
        """Drops further messages of the worker for a stream."""
        super().release(stream)
        self.keep.pop(stream.slot, None)

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the worker, or since it became busy if that is later."""
        return monotonic() - self._active_at

    def break_off_silent(self) -> None:
        """Ends the session as if the worker was lost, and opens its circuit breaker."""
        self.breaker.trip()
        self.break_off()

    def start(
        self,
        stream: GenerationStream,
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
        request, prompt = stream.request, stream.prompt
        if resumed:
            prompt = replace(prompt, token_ids=prompt.token_ids + pack_u32(stream.tokens[:resumed]))
        message = worker_pb2.GenerateRequest(
            request_id=request_id,
            model=request.model,
            tokens=worker_pb2.TokenPrompt(token_ids=prompt.token_ids) if prompt.has_token_ids else None,
            embeds=_embeds(prompt.embeds) if prompt.embeds else None,
            sampling=_sampling(request.sampling, stream.seed),
            stop=_stop(request.stop, prompt, stream.max_tokens, resumed),
            output=_output(request, stream.computed),
            guided=_guided(request.guided) if request.guided else None,
            lora=request.lora,
            cache_salt=request.cache_salt,
            priority=request.priority,
            data_parallel_rank=rank,
            trace=telemetry.trace_context(stream.current_span),
            resumed_tokens=resumed,
            disaggregation=None if part is None else _part(part),
            postprocess=stream_options(request, prompt) if request.engine_text else None,
        )
        if isinstance(prompt.raw, TextPrompt):
            message.text = prompt.raw.text
        elif prompt.raw is not None:
            message.messages_json = _messages(prompt.raw)
        start = worker_pb2.SessionStart(slot=stream.slot, request=message)
        size = start.ByteSize()
        if size + _START_OVERHEAD_BYTES > self._max_start_bytes:
            raise _too_large(size, self._max_start_bytes)
        self._starts.append((start, size))
        self._wake()

    def cancel(self, slot: int) -> None:
        """Cancels a generation on the worker."""
        self._cancels.append(slot)
        self._wake()

    def _open_call(self) -> grpc.aio.StreamStreamCall[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch]:
        return self.stub.Session()

    def _drain(self) -> worker_pb2.WorkerSessionRequest | None:
        if not self._starts and not self._cancels:
            return None
        starts = take_within(self._starts, START_BYTES_PER_MESSAGE)  # workers limit the size of messages
        # A cancel must not overtake the start of its generation.
        cancels: list[int] = []
        if not self._starts:
            cancels, self._cancels = self._cancels, []
        return worker_pb2.WorkerSessionRequest(starts=starts, cancels=pack_u32(cancels))

    def _on_message(self, message: worker_pb2.TokenBatch) -> None:
        self._active_at = monotonic()
        if len(message.token_ids) > self._batch_tokens.limit * TOKEN_BYTES:
            self._end_invalid(
                self._batch_tokens.refuse(
                    f"The {self.peer} sent {len(message.token_ids) // TOKEN_BYTES} tokens in one message; at most "
                    f"{self._batch_tokens.limit} are accepted",
                    kind=ErrorKind.INTERNAL,
                )
            )
            return
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

    def _on_extra(self, stream: GenerationStream, extra: worker_pb2.TokenExtra) -> None:
        events = self._events
        if extra.prompt_token_ids:
            events.on_prompt(stream, extra.prompt_token_ids)
        if extra.prompt_logprobs:
            events.on_prompt_logprobs(stream, [_position(position) for position in extra.prompt_logprobs])
        if extra.logprobs:
            events.on_logprobs(stream, [_position(position) for position in extra.logprobs])
        if extra.HasField("cached_tokens"):
            events.on_started(stream, extra.cached_tokens)
        if extra.events:
            self._on_text_events(stream, extra)
        if extra.finish_reason == common_pb2.FINISH_REASON_ERROR:
            events.on_failed(stream, passed_on(from_detail(extra.error), self.peer))
        elif extra.finish_reason == common_pb2.FINISH_REASON_HANDOFF:
            events.on_handoff(stream, extra.handoff)
        elif extra.finish_reason:
            stop_token_id = extra.stop_token_id if extra.HasField("stop_token_id") else None
            reason = FinishReason.of(extra.finish_reason)
            usage = extra.usage
            if stream.request.text_only:
                stream.prompt = replace(stream.prompt, counted=usage.prompt_tokens)
            events.on_ended(stream, reason, stop_token_id, usage.completion_tokens, usage.cached_tokens)

    def _on_text_events(self, stream: GenerationStream, extra: worker_pb2.TokenExtra) -> None:
        if not stream.request.engine_text:
            raise invalid(f"The {self.peer} sent text for a stream that postprocess detokenizes.")
        for event in extra.events:
            if event.HasField("tokens"):
                dispatch_token_texts(self._events, stream, event)
            dispatch_event(self._events, stream, event)

    def _reset(self) -> None:
        self._starts.clear()
        self._cancels.clear()


def _too_large(size: int, max_bytes: int) -> SluiceError:
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"The request takes {size} bytes as sent to a worker, but workers accept at most {max_bytes}: shorten the "
        "prompt, or raise the workers' --max-message-mb and the gateway's --worker-message-mb.",
        code="request_too_large",
    )


def _sampling(sampling: SamplingParams, seed: int | None) -> common_pb2.SamplingOptions:
    return common_pb2.SamplingOptions(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=seed,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=pack_u32(sampling.allowed_token_ids),
        bad_words=[pack_u32(word) for word in sampling.bad_words],
        thinking_token_budget=sampling.thinking_token_budget,
        engine_options_json=orjson.dumps(sampling.engine_options) if sampling.engine_options else b"",
    )


def _part(part: DisaggregationPart) -> worker_pb2.DisaggregationParams:
    role = common_pb2.WorkerRole.ValueType(int(part.role))
    return worker_pb2.DisaggregationParams(role=role, handoff=part.handoff)


def _output(request: GenerationRequest, computed: bool) -> common_pb2.OutputOptions | None:
    """Returns the requested log-probabilities; those of a prompt that was computed before have been received."""
    prompt_logprobs = None if computed else request.prompt_logprobs
    if request.logprobs is None and prompt_logprobs is None:
        return None
    return common_pb2.OutputOptions(logprobs=request.logprobs, prompt_logprobs=prompt_logprobs)


def _guided(guided: StructuredOutput) -> common_pb2.GuidedDecoding:
    kind, grammar = guided.kind, guided.grammar
    if kind == "choice":
        return common_pb2.GuidedDecoding(choice=common_pb2.GuidedDecoding.ChoiceList(choices=grammar))
    if kind == "json_object":
        return common_pb2.GuidedDecoding(json_object=True)
    message = common_pb2.GuidedDecoding()
    setattr(message, kind, grammar)
    return message


def _messages(prompt: ChatPrompt) -> bytes:
    """Returns an OpenAI request body with the fields that determine the prompt."""
    opens = prompt.add_generation_prompt
    parts = {
        b"messages": prompt.messages_json,
        b"tools": prompt.tools_json,
        b"tool_choice": prompt.tool_choice_json,
        b"chat_template_kwargs": prompt.template_kwargs_json,
        b"documents": prompt.documents_json,
        b"chat_template": orjson.dumps(prompt.chat_template) if prompt.chat_template else b"",
        b"continue_final_message": b"true" if prompt.continue_final_message else b"",
        b"add_generation_prompt": b"" if opens is None else orjson.dumps(opens),
    }
    return b"{%b}" % b",".join(b'"%b":%b' % part for part in parts.items() if part[1])


def _embeds(embeds: EmbedsPrompt) -> worker_pb2.EmbedsPrompt:
    return worker_pb2.EmbedsPrompt(values=embeds.values, width=embeds.width)


def _position(position: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(_token(position.chosen), tuple([_token(token) for token in position.top]))


def _token(token: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.rank)


def _stop(stop: StopParams, prompt: TokenizedPrompt, max_tokens: int, generated: int) -> common_pb2.StopOptions:
    return common_pb2.StopOptions(
        max_tokens=None if prompt.raw is not None and stop.max_tokens is None else max_tokens - generated,
        min_tokens=max(stop.min_tokens - generated, 0),
        stop_token_ids=pack_u32(stop.token_ids) + (b"" if stop.ignore_eos else prompt.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        eos_token_ids=prompt.eos_token_ids,
    )
