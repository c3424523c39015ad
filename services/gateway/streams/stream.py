"""One choice under way: where it runs, what it has said, and all that is needed to go on with it elsewhere."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from opentelemetry.trace import Span

from services.common.errors import SluiceError, internal
from services.common.observability import telemetry
from services.common.packing import unpack_u32
from services.gateway.clients.postprocess_link import PostLink, Sent
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core import request_audit
from services.gateway.core.deadlines import Deadline
from services.gateway.core.request import (
    NULL_SINK,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    Route,
    Sink,
    TokenizedPrompt,
)

TAIL_TOKENS = 16
"""Ids of a prompt's end, which its text goes on from; as preprocess says them."""


class EngineEnd(NamedTuple):
    """How the engine ended a generation; `stop_token_id` is the id that did."""

    reason: FinishReason
    stop_token_id: int | None = None


class Pair(NamedTuple):
    """Who goes on when the prefill worker of a stream is done.

    Attributes:
        worker: the decode worker, with its data-parallel rank.
        name: of the request on both workers.
        resumed: tokens that there were before the prefill; both workers get them with the prompt.
    """

    worker: WorkerLink
    rank: int | None
    name: str
    resumed: int


class Loss(NamedTuple):
    """A worker that could not go on with a stream, what it had opened of sessions until then, and when that was."""

    worker: WorkerLink
    sessions: int
    at: float


class GenerationStream:
    """One choice of a request.

    Attributes:
        worker: where it is computed; None once the engine is done, and while it moves to another worker.
        post: where its text is made; None while it waits for a replica.
        tokens: everything generated so far, by all its workers.
        resumed: how many of them came from earlier workers.
        booked_from: how many there were when its worker, or its pair of workers, was booked.
        logprob_positions: how many tokens of the answer have come with log-probabilities.
        prompt_positions: the same of the prompt.
        prompt_ids: of a prompt that the worker makes, once they are known; None: they are in `prompt`.
        pair: set while a pair works on it.
        handed_over: the second worker of the pair does.
        text_sent: code points of content that the sink has got; counted here because most of what is said is that.
        sent: how much of everything else the sink has got.
        end: set when the engine is done.
        migrations: how often another worker took over.
        losses: the workers it was lost by, by id, the last one last.
        replays: how often its text was taken up by another replica after a loss.
        mover: looks for another worker.
        cached_tokens: of the prompt, on its first worker.
    """

    __slots__ = (
        "active",
        "attempt_cached",
        "audit",
        "booked_from",
        "cached_tokens",
        "completion_tokens",
        "computed",
        "deadline",
        "degraded",
        "end",
        "expiry",
        "first_text_at",
        "handed_over",
        "index",
        "logprob_positions",
        "losses",
        "max_tokens",
        "migration_task",
        "migrations",
        "pair",
        "post",
        "prompt",
        "prompt_ids",
        "prompt_positions",
        "reasoning_tokens",
        "replays",
        "request",
        "reservation_id",
        "resumed",
        "sent",
        "sink",
        "slot",
        "span",
        "started_at",
        "text_sent",
        "tokens",
        "tokens_at_last_sweep",
        "waiting_since",
        "worker",
        "worker_span",
    )

    def __init__(
        self,
        slot: int,
        request: GenerationRequest,
        index: int,
        prompt: TokenizedPrompt,
        max_tokens: int,
        sink: Sink,
        deadline: Deadline,
    ) -> None:
        self.slot = slot
        self.request = request
        self.index = index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.audit = request_audit.of_request()
        self.sink = sink if self.audit is None else self.audit.listening(sink)
        self.deadline = deadline
        self.expiry: asyncio.TimerHandle | None = None
        self.worker: WorkerLink | None = None
        self.reservation_id = ""
        self.post: PostLink | None = None
        self.waiting_since = 0.0
        self.tokens = array("I")
        self.resumed = 0
        self.booked_from = 0
        self.logprob_positions = 0
        self.prompt_positions = 0
        self.prompt_ids = None if prompt.raw is None else array("I")
        self.pair: Pair | None = None
        self.handed_over = False
        self.text_sent = 0
        self.sent = Sent()
        self.end: EngineEnd | None = None
        self.migrations = 0
        self.losses: dict[str, Loss] = {}
        self.replays = 0
        self.migration_task: asyncio.Task[None] | None = None
        self.cached_tokens = 0
        self.attempt_cached: int | None = None
        self.computed = False  # its prompt
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.degraded: tuple[str, ...] = ()
        self.active = True  # said something since the last sweep
        self.tokens_at_last_sweep = 0  # tokens at the last sweep
        self.started_at = perf_counter()
        self.first_text_at = 0.0
        self.span: Span | None = None
        self.worker_span: Span | None = None
        if self.audit is not None:
            self.audit.began(request.request_id, request.model, 0 if index else prompt.length)

    @property
    def model(self) -> str:
        """Served name."""
        return self.request.model

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the client's prompt."""
        return self.prompt.length

    @property
    def request_id(self) -> str:
        """Of this choice; the same wherever it runs."""
        return f"{self.request.request_id}-{self.index}"

    @property
    def seed(self) -> int | None:
        """Each choice has its own; after the largest comes the smallest, as there are 64 bits for it."""
        seed = self.request.sampling.seed
        return None if seed is None else (seed + self.index + 2**63) % 2**64 - 2**63

    @property
    def current_span(self) -> Span | None:
        """What the services that work on it now continue."""
        return self.worker_span or self.span

    def part(self) -> Sink:
        """The sink, which hears of the end only from now on: it knows the answer, and the answer knows this stream."""
        sink, self.sink = self.sink, NULL_SINK
        return sink

    def end_spans(self, error: SluiceError | None = None, gone: bool = False) -> None:
        """Everything about it has been said; `gone`: because the client went away."""
        if self.audit is not None:
            self.audit.ended(self.completion_tokens or len(self.tokens), self.cached_tokens, error, gone)
        for span in (self.worker_span, self.span):
            if span is None:
                continue
            span.set_attribute("output_tokens", self.completion_tokens)
            span.set_attribute("migrations", self.migrations)
            if error is not None:
                telemetry.fail_span(span, error.message)
            span.end()

    def attach(self, worker: WorkerLink, route: Route) -> None:
        """From now on this worker computes it."""
        self.worker = worker
        if self.audit is not None:
            self.audit.worked_on_by(worker.worker_id)
        self.reservation_id = route.reservation_id
        self.attempt_cached = None
        self.resumed = self.booked_from = len(self.tokens)
        self.pair = None
        self.handed_over = False
        worker.adopt(self)

    def shift(self, worker: WorkerLink) -> None:
        """Another worker of the same booking goes on."""
        if self.worker is not None:
            self.worker.release(self)
        self.worker = worker
        self.resumed = len(self.tokens)
        worker.adopt(self)

    def learn_prompt(self, token_ids: bytes) -> None:
        """The worker has made the prompt's ids, packed u32."""
        prompt = self.prompt
        self.prompt = replace(prompt, token_ids=token_ids, prompt_tail=token_ids[-4 * TAIL_TOKENS :], raw=None)
        if self.prompt_ids is not None:
            self.prompt_ids.extend(unpack_u32(token_ids))
        if prompt.context_length:
            self.max_tokens = min(self.max_tokens, prompt.context_length - self.prompt.length)

    def take_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """Counts log-probabilities of generated tokens; SluiceError when they are not what was requested."""
        self.logprob_positions += len(positions)
        if self.request.logprobs is None or self.logprob_positions > self.max_tokens:
            raise internal("The worker sent log-probabilities that were not requested.")
        _check_alternatives(positions, self.request.logprobs)

    def take_prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """Counts log-probabilities of the prompt; SluiceError when they are not what was requested."""
        self.prompt_positions += len(positions)
        if self.request.prompt_logprobs is None or self.prompt_positions > self.prompt_tokens:
            raise internal("The worker sent log-probabilities of the prompt that were not requested.")
        _check_alternatives(positions, self.request.prompt_logprobs)

    def asked_to_end_at(self, token_id: int) -> bool:
        """Whether it is the client that wanted this id to end it, not the model."""
        stop = self.request.stop
        return token_id in stop.token_ids and (stop.ignore_eos or token_id not in unpack_u32(self.prompt.eos_token_ids))

    def known_end(self) -> EngineEnd | None:
        """How the tokens so far end the generation, if they do, whoever computed them."""
        stop, prompt, count = self.request.stop, self.prompt, len(self.tokens)
        if not count:
            return None
        eos = unpack_u32(prompt.eos_token_ids)
        if stop.ignore_eos:
            stop_ids = set(stop.token_ids).difference(eos)
        else:
            stop_ids = {*stop.token_ids, *unpack_u32(prompt.stop_token_ids), *eos}
        if count > stop.min_tokens and self.tokens[-1] in stop_ids:
            return EngineEnd(FinishReason.STOP, self.tokens[-1])
        return EngineEnd(FinishReason.LENGTH) if count >= self.max_tokens else None


def _check_alternatives(positions: Sequence[PositionLogprobs], most: int) -> None:
    """Raises SluiceError when a position has more alternatives than requested; engines may add the chosen token."""
    if any(len(position.top) > most + 1 for position in positions):
        raise internal("The worker sent more alternatives of a token than were requested.")
