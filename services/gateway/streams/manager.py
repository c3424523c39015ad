"""Starts generations on their workers, and resumes them on others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from math import inf

from services.common.base.errors import ErrorKind, SluiceError
from services.common.observability import telemetry
from services.gateway.backends.placement.interfaces import Placement
from services.gateway.core import deadlines
from services.gateway.core.context import NO_CONTEXT, RequestContext
from services.gateway.core.request import (
    DisaggregationPart,
    GenerationRequest,
    Reservations,
    Role,
    Sink,
    TokenizedPrompt,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.audit import recorded
from services.gateway.streams.interfaces import NoRecovery, StreamObserver
from services.gateway.streams.link_events import LinkEvents
from services.gateway.streams.running import POST_WAIT_S, RunningStreams
from services.gateway.streams.running_memory import RunningMemory, RunningShare
from services.gateway.streams.states import StreamState
from services.gateway.streams.stream import GenerationStream, RecoveryPolicy, TextLink, WorkerStart

NO_RECOVERY = NoRecovery()


class StreamManager(RunningStreams):
    """The running streams of this process, and the way to start another.

    Args:
        memory: None for one with the default limit; the others as in RunningStreams.

    Attributes:
        memory: bounds the memory of the requests of all streams.
        events: handles what the links deliver.
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
        super().__init__(max_streams, reservations, metrics, post_wait_s, observers)
        self.memory = memory or RunningMemory()
        self.events = LinkEvents(self)
        self._slots = count(1)

    def expect(self, choices: int) -> None:
        """Admits `choices` streams as `admit` does, and counts them until `settle`, before they are connected."""
        self.admit(choices)
        self._expected += choices

    def settle(self, choices: int) -> None:
        """Ends what `expect` began: the streams have been connected, or will not be."""
        self._expected -= choices

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
        name = stream.request_id
        stream.span = telemetry.start_span(
            "gateway.generate", request_id=name, worker=placement.worker.worker_id, choice=index
        )
        self._streams[slot] = stream
        for observer in self._observers:
            observer.on_started(stream)
        if context.deadline.at != inf:
            stream.expiry = asyncio.get_running_loop().call_at(
                context.deadline.at, self.give_up, stream, deadlines.overdue()
            )
        self._place(stream, placement, name)
        if stream.state is not StreamState.ENDED:  # otherwise the start has failed
            self.texts.start(stream)
        return stream

    def resume(self, stream: GenerationStream, placement: Placement) -> None:
        """Continues a suspended stream on another worker, or pair of workers, after its existing tokens."""
        stream.migration_task = None
        self._place(stream, placement, f"{stream.request_id}-m{stream.migrations}")

    def _place(self, stream: GenerationStream, placement: Placement, name: str) -> None:
        route, worker, prefill = placement
        for reason in (route.degraded, route.split_skipped):
            if reason:
                self.degrade(stream, reason)
        start = WorkerStart(worker, route.rank, name, len(stream.tokens))
        if prefill is None:
            self.book(stream, route)
        else:
            self.book(stream, route, decode=start)
            part = DisaggregationPart(Role.PREFILL)
            start = start._replace(worker=prefill, rank=route.prefill_rank, part=part)
        self.start_on_worker(stream, start)

    def start_on_worker(self, stream: GenerationStream, start: WorkerStart) -> None:
        """Starts a stream on a worker of its current attempt, where it continues after its existing tokens."""
        worker, part = start.worker, start.part
        if part is None:
            stream.assign(worker, StreamState.RUNNING)
        else:
            stream.assign(worker, StreamState.PREFILLING if part.role is Role.PREFILL else StreamState.DECODING)
        for observer in self._observers:
            observer.on_assigned(stream, worker.worker_id)
        if not worker.connected:  # disconnected since it was chosen: the start might wait forever
            self.events.on_failed(
                stream, SluiceError(ErrorKind.CANNOT_CONNECT, f"The {worker.peer} cannot be reached.")
            )
            return
        try:
            worker.start(stream, start.name, start.rank, start.resumed, part)
        except SluiceError as error:
            self.events.on_failed(stream, error)
        except Exception as error:
            self.events.on_broken(stream, error)
