"""Migration: when a worker is lost, another one continues its generations from prompt and generated tokens.

Clients see a short pause. The postprocess stream stays open, so stop strings, tool calls and reasoning continue where
they were. The new worker receives the number of generated tokens in its prompt; engines that can resume count those as
output, for seeds, penalties and the state of a grammar.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import replace
from functools import partial
from time import monotonic

from services.common.base import logs
from services.common.base.errors import SluiceError, internal, unavailable
from services.common.base.packing import pack_u32
from services.common.base.tasks import TaskOwner
from services.common.observability import telemetry
from services.common.rpc.errors import PEER_CANCELLED, PEER_REFUSED
from services.gateway.backends.placement.disaggregation_policy import DisaggregationPolicy
from services.gateway.backends.placement.interfaces import Placement, PlacementRequest, PlaceStage
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core.deadlines import overdue
from services.gateway.core.deaths import MAX_DEATHS
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.migration_policy import MigrationPolicy
from services.gateway.streams.stream import GenerationStream, Loss
from services.gateway.streams.suspects import Suspects

log = logging.getLogger(__name__)

RESUME = "resume"
RESUME_GUIDED = "resume_guided"
INEXACT = "migration_inexact"
MAX_CONCURRENT = 64
"""Migrations that a gateway runs at the same time; further ones wait."""
RETRY_PAUSE_S = 0.1
DISTRUST_S = 3.0
"""How long a generation avoids a worker that it lost; discovery removes dead workers within this time."""
SEPARATE_S = 1.0
"""How long a suspect waits for a worker without another suspect."""
NOT_CURED_BY_TIME = frozenset({PEER_REFUSED, PEER_CANCELLED})
"""Codes of errors that a worker repeats for as long as it runs."""

__all__ = ["MigrationPolicy", "Migrator"]


class Migrator:
    """Migrates generations whose worker cannot continue them.

    Args:
        tasks: owner of the migration tasks.
    """

    def __init__(
        self,
        policy: MigrationPolicy,
        placement: PlaceStage,
        disaggregation: DisaggregationPolicy,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        streams: StreamManager,
        metrics: GatewayMetrics,
        tasks: TaskOwner,
    ) -> None:
        self._policy = policy
        self._placement = placement
        self._disaggregation = disaggregation
        self._registry = registry
        self._connections = connections
        self._streams = streams
        self._metrics = metrics
        self._tasks = tasks
        self._concurrent = asyncio.Semaphore(MAX_CONCURRENT)
        self._suspects = Suspects()
        self._next_suspect: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by model

    def take_over(self, stream: GenerationStream, lost: WorkerLink, error: SluiceError) -> bool:
        """Starts the migration of a stream; returns False if it must not migrate."""
        obstacle = self._obstacle(stream, lost, error)
        if (
            not obstacle
            and self._suspects.record(stream, lost, error, partial(self._streams.choices, stream)) >= MAX_DEATHS
        ):
            obstacle = "suspect"
            log.error(
                "a request is not tried again: its workers died while they ran it",
                extra={"request": stream.request_id, "worker": lost.worker_id},
            )
        if obstacle:
            self._metrics.migration(obstacle)
            return False
        self._streams.suspend(stream)
        stream.migrations += 1
        stream.losses.pop(lost.worker_id, None)
        stream.losses[lost.worker_id] = Loss(lost, lost.sessions, monotonic())
        log.warning(
            "generation moves to another worker: %s",
            error.message,
            extra={"request": stream.request_id, "worker": lost.worker_id, "tokens": len(stream.tokens)},
        )
        stream.migration_task = self._tasks.spawn(self._move(stream, lost, error), f"migration-{stream.slot}")
        return True

    def _obstacle(self, stream: GenerationStream, lost: WorkerLink, error: SluiceError) -> str:
        """Returns why a stream must not migrate, as a metric outcome; empty when it may."""
        policy, generated = self._policy, len(stream.tokens)
        if not policy.enabled:
            return "disabled"
        if not error.retryable:
            return "not_retryable"
        if error.code in NOT_CURED_BY_TIME and not self._has_untried_worker(stream, lost):
            return "no_worker"  # at once, with the worker's own error
        if stream.migrations >= policy.limit:
            return "limit"
        if policy.max_tokens and stream.prompt_tokens + generated > policy.max_tokens:
            return "too_long"
        if generated and stream.prompt.embeds is not None:
            return "embeddings"
        if stream.request.text_only and (stream.text_sent or stream.sent.reasoning or stream.sent.calls):
            return "text_only"
        if (
            generated
            and stream.request.guided is not None
            and not self._registry.has_capability(stream.model, RESUME_GUIDED)
        ):
            return "guided"
        return ""

    def _has_untried_worker(self, stream: GenerationStream, lost: WorkerLink) -> bool:
        tried = {lost.worker_id, *stream.losses}
        return any(entry.worker_id not in tried for entry in self._registry.of_model(stream.model))

    async def _move(self, stream: GenerationStream, lost: WorkerLink, cause: SluiceError) -> None:
        logs.request_id.set(stream.request_id)
        try:
            async with asyncio.timeout(min(self._policy.wait_s, stream.context.deadline.left_s)):
                await self._continue_elsewhere(stream, lost, cause)
        except TimeoutError:
            late = stream.context.deadline.left_s <= 0
            none = unavailable("No other worker could take the generation over in time.", code="no_workers")
            self._give_up(stream, overdue() if late else none)
        except SluiceError as error:
            self._give_up(stream, error, "suspect" if error is cause else "no_worker")
        except Exception:
            log.exception("migration failed")
            self._give_up(stream, internal("Unexpected failure in the gateway; see its log for details."))

    async def _continue_elsewhere(self, stream: GenerationStream, lost: WorkerLink, cause: SluiceError) -> None:
        """Retries until a worker is available, and continues the stream there.

        Raises:
            SluiceError: `cause` when a choice of the same request has meanwhile ended the last worker it may end.
        """
        attempt, since = 0, monotonic()
        suspect = self._suspects.includes(stream)
        while True:
            try:
                # Not held while pausing: a model without workers would block all others.
                async with self._next_suspect[stream.model] if suspect else self._concurrent:
                    avoided = self._avoided_workers(stream)
                    taken: list[str] = []
                    workers = [entry.worker_id for entry in self._registry.of_model(stream.model)]
                    if suspect:
                        self._check_suspect(stream, cause)
                        separate = monotonic() - since < SEPARATE_S
                        taken = self._suspects.workers_to_avoid(stream, workers, separate)
                        avoided += taken
                    if not taken or not set(workers) <= set(avoided):
                        placement = await self._placement.place(self._placement_request(stream, attempt), avoided)
                        if suspect:
                            self._streams.book(stream, placement.route)  # released when the stream ends here
                            self._check_suspect(stream, cause)
                        self._resume(stream, lost, placement)
                        return
            except SluiceError as error:
                if error is cause or not error.retryable:
                    raise
            attempt += 1
            await asyncio.sleep(RETRY_PAUSE_S)

    def _check_suspect(self, stream: GenerationStream, cause: SluiceError) -> None:
        if self._suspects.deaths(stream) >= MAX_DEATHS:
            raise cause.with_traceback(None)

    def _avoided_workers(self, stream: GenerationStream) -> list[str]:
        """Returns workers to avoid until they reconnect: the last one lost and, as failures correlate, recent ones."""
        *_, last = stream.losses
        since = monotonic() - DISTRUST_S
        return [
            name
            for name, loss in stream.losses.items()
            if (name == last or loss.at > since) and not self._has_returned(name, loss)
        ]

    def _has_returned(self, worker_id: str, loss: Loss) -> bool:
        link = self._connections.find(worker_id)
        if link is None or not link.connected or link.breaker.tripped:
            return False
        return link is not loss.worker or link.sessions > loss.sessions

    def _placement_request(self, stream: GenerationStream, attempt: int) -> PlacementRequest:
        request, generated = stream.request, len(stream.tokens)
        entry = self._registry.model(stream.model)
        guided = generated and request.guided is not None
        prompt = stream.prompt
        if generated:  # the router computes the block hashes
            token_ids = prompt.token_ids + pack_u32(stream.tokens)
            prompt = replace(prompt, token_ids=token_ids, block_hashes=b"", hash_scheme="")
        return PlacementRequest(
            request=request,
            reservation=f"{stream.request_id}-m{stream.migrations}" + (f".{attempt}" if attempt else ""),
            prompt=prompt,
            block_size=entry.block_size,
            output_tokens=stream.max_tokens - generated if request.stop.max_tokens else 0,
            deadline=stream.context.deadline,
            needs=((RESUME_GUIDED, "response_format"),) if guided else (),
            disaggregation=self._disaggregation,
        )

    def _resume(self, stream: GenerationStream, lost: WorkerLink, placement: Placement) -> None:
        worker = placement.worker
        self._metrics.migration("moved")
        note_inexact(self._streams, stream, self._registry.workers.get(worker.worker_id))
        if stream.span is not None:
            _trace(stream, lost, worker)
        self._streams.resume(stream, placement)
        if self._suspects.includes(stream):
            self._suspects.start(stream)

    def _give_up(self, stream: GenerationStream, error: SluiceError, outcome: str = "no_worker") -> None:
        stream.migration_task = None  # this is the running task, which must not cancel itself
        self._metrics.migration(outcome)
        self._streams.give_up(stream, error)


def note_inexact(streams: StreamManager, stream: GenerationStream, worker: WorkerEntry | None) -> None:
    """Records a fallback if sampling depends on which tokens were generated and the next worker cannot resume."""
    sampling = stream.request.sampling
    depends = sampling.seed is not None or bool(sampling.frequency_penalty or sampling.presence_penalty)
    if stream.tokens and depends and (worker is None or RESUME not in worker.capabilities):
        streams.degrade(stream, INEXACT)


def _trace(stream: GenerationStream, lost: WorkerLink, worker: WorkerLink) -> None:
    """Adds an event to the generation's span, and starts a span for the new worker, linked to the previous one."""
    assert stream.span is not None
    stream.span.add_event(
        "migrated", {"from": lost.worker_id, "to": worker.worker_id, "generated_tokens": len(stream.tokens)}
    )
    before = stream.worker_span or stream.span
    after = telemetry.start_span(
        "gateway.resume",
        telemetry.headers(stream.span),
        worker=worker.worker_id,
        migration=stream.migrations,
        resumed_tokens=len(stream.tokens),
    )
    if after is not None:
        after.add_link(before.get_span_context())
        if stream.worker_span is not None:
            stream.worker_span.end()
        stream.worker_span = after
