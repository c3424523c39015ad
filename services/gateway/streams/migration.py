"""Generations that outlive their worker: another one goes on with prompt and generated tokens.

The client sees a pause. Its text is still made on the same postprocess stream, so stop strings, tool calls and
reasoning go on where they were; the new worker is told how many tokens of its prompt were generated, so that an engine
that can resume counts them as output (seeds, penalties, the place in a grammar).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace
from time import monotonic
from typing import Protocol

from services.common import logs
from services.common.errors import SluiceError, internal, unavailable
from services.common.observability import telemetry
from services.common.packing import pack_u32
from services.common.tasks import TaskOwner
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.deadlines import overdue
from services.gateway.core.request import SamplingParams, TokenizedPrompt
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement.selector import Placement, PlacementRequest
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.migration_policy import MigrationPolicy
from services.gateway.streams.stream import GenerationStream, Loss
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerRegistry

log = logging.getLogger(__name__)

RESUME = "resume"
RESUME_GUIDED = "resume_guided"
INEXACT = "migration_inexact"
AT_ONCE = 64
PAUSE_S = 0.1
DISTRUST_S = 3.0
"""Discovery knows of a dead worker before this; until then a generation does not go back to one that it lost."""


__all__ = ["MigrationPolicy", "Migrator"]


class Placing(Protocol):
    """Finds workers, as `placement.WorkerSelector`."""

    async def place(self, placement_request: PlacementRequest, excluded: Collection[str] = ()) -> Placement: ...


class Migrator:
    """Moves generations off workers that cannot go on with them.

    Args:
        tasks: owns the moves.
    """

    def __init__(
        self,
        policy: MigrationPolicy,
        placement: Placing,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        stream_manager: StreamManager,
        metrics: GatewayMetrics,
        tasks: TaskOwner,
    ) -> None:
        self._policy = policy
        self._placement = placement
        self._registry = registry
        self._connections = connections
        self._stream_manager = stream_manager
        self._metrics = metrics
        self._tasks = tasks
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def take_over(self, stream: GenerationStream, lost: WorkerLink, error: SluiceError) -> bool:
        """Whether the stream goes on, on another worker and some time later."""
        obstacle = self._obstacle(stream, error)
        if obstacle:
            self._metrics.migration(obstacle)
            return False
        stream.migrations += 1
        stream.losses.pop(lost.worker_id, None)
        stream.losses[lost.worker_id] = Loss(lost, lost.sessions, monotonic())
        log.warning(
            "a generation moves to another worker: %s",
            error.message,
            extra={"request": stream.request_id, "worker": lost.worker_id, "tokens": len(stream.tokens)},
        )
        stream.migration_task = self._tasks.spawn(self._move(stream, lost), f"migration-{stream.slot}")
        return True

    def _obstacle(self, stream: GenerationStream, error: SluiceError) -> str:
        """Why a stream has to stay, as a word for the metric; empty when it may move."""
        policy, generated = self._policy, len(stream.tokens)
        if not policy.enabled:
            return "disabled"
        if not error.retryable:
            return "not_retryable"
        if stream.migrations >= policy.limit:
            return "limit"
        if policy.max_tokens and stream.prompt_tokens + generated > policy.max_tokens:
            return "too_long"
        if generated and stream.prompt.embeds is not None:
            return "embeddings"
        if generated and stream.request.guided is not None and not self._resuming(stream, RESUME_GUIDED):
            return "guided"
        return ""

    def _resuming(self, stream: GenerationStream, capability: str) -> bool:
        return any(capability in worker.capabilities for worker in self._registry.of_model(stream.model))

    async def _move(self, stream: GenerationStream, lost: WorkerLink) -> None:
        logs.request_id.set(stream.request_id)
        try:
            async with asyncio.timeout(min(self._policy.wait_s, stream.deadline.left_s)):
                placed = await self._find(stream)
            self._resume(stream, lost, placed)
        except TimeoutError:
            self._give_up(stream, overdue() if stream.deadline.left_s <= 0 else _nobody())
        except SluiceError as error:
            self._give_up(stream, error)
        except Exception:
            log.exception("a migration failed")
            self._give_up(stream, internal("Unexpected failure in the gateway; its log has the details."))

    async def _find(self, stream: GenerationStream) -> Placement:
        """Asks until a worker takes it."""
        attempt = 0
        while True:
            try:
                async with self._at_once:  # not through the pause: a model without workers would hold up all others
                    return await self._placement.place(self._wanted(stream, attempt), self._distrusted(stream))
            except SluiceError as error:
                if not error.retryable:
                    raise
            attempt += 1
            await asyncio.sleep(PAUSE_S)

    def _distrusted(self, stream: GenerationStream) -> list[str]:
        """The worker that lost it, until it is back, and for a moment those that did before: workers die together."""
        *_, last = stream.losses
        since = monotonic() - DISTRUST_S
        return [
            name
            for name, loss in stream.losses.items()
            if (name == last or loss.at > since) and not self._is_back(name, loss)
        ]

    def _is_back(self, worker_id: str, loss: Loss) -> bool:
        link = self._connections.find(worker_id)
        if link is None or not link.connected or link.breaker.tripped:
            return False
        return link is not loss.worker or link.sessions > loss.sessions

    def _wanted(self, stream: GenerationStream, attempt: int) -> PlacementRequest:
        request, generated = stream.request, len(stream.tokens)
        entry = self._registry.model(stream.model)
        guided = generated and request.guided is not None
        return PlacementRequest(
            request=request,
            reservation=f"{stream.request_id}-m{stream.migrations}" + (f".{attempt}" if attempt else ""),
            prompt=_with_generated(stream.prompt, stream),
            block_size=entry.block_size,
            output_tokens=stream.max_tokens - generated if request.stop.max_tokens else 0,
            deadline=stream.deadline,
            needs=((RESUME_GUIDED, "response_format"),) if guided else (),
        )

    def _resume(self, stream: GenerationStream, lost: WorkerLink, placed: Placement) -> None:
        worker = placed.worker
        self._metrics.migration("moved")
        if stream.tokens and is_history_dependent(stream.request.sampling) and not self._resumes(worker):
            self._stream_manager.on_degraded(stream, INEXACT)
        if stream.span is not None:
            _trace(stream, lost, worker)
        self._stream_manager.resume(stream, placed.route, worker, placed.prefill)

    def _resumes(self, worker: WorkerLink) -> bool:
        entry = self._registry.workers.get(worker.worker_id)
        return entry is not None and RESUME in entry.capabilities

    def _give_up(self, stream: GenerationStream, error: SluiceError) -> None:
        stream.migration_task = None  # this is it: there is nothing left to be cancelled
        self._metrics.migration("nobody")
        self._stream_manager.give_up(stream, error)


def _with_generated(prompt: TokenizedPrompt, stream: GenerationStream) -> TokenizedPrompt:
    """The prompt as the next worker gets it; the router makes its block hashes itself."""
    if not stream.tokens:
        return prompt
    return replace(prompt, token_ids=prompt.token_ids + pack_u32(stream.tokens), block_hashes=b"", hash_scheme="")


def is_history_dependent(sampling: SamplingParams) -> bool:
    """The next token depends on more than the tokens before it: on which of them were generated, or how many."""
    return sampling.seed is not None or bool(sampling.frequency_penalty or sampling.presence_penalty)


def _trace(stream: GenerationStream, lost: WorkerLink, worker: WorkerLink) -> None:
    """An event on the generation's span, and a span for its further way that links to the way so far."""
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


def _nobody() -> SluiceError:
    return unavailable("No other worker could take the generation over in time.", code="no_workers")
