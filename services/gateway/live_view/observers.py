"""Clients and stream manager that report to the live view's request history, if one is set."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from services.common.errors import SluiceError
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.core.request import Finish, Route, TokenizedPrompt
from services.gateway.live_view.request_history import PromptTimes, RequestHistory, prompt_times
from services.gateway.live_view.routing_explanations import RoutingExplanations
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.stream import GenerationStream


class ObservedPreprocess(PreprocessClient):
    """Records the duration and failures of tokenization."""

    request_history: RequestHistory | None = None

    async def tokenize(self, *args: Any, **more: Any) -> TokenizedPrompt:
        if self.request_history is None:
            return await super().tokenize(*args, **more)
        times = PromptTimes(perf_counter())
        prompt_times.set(times)
        try:
            return await super().tokenize(*args, **more)
        except SluiceError as error:
            _count_failure(self.request_history, "preprocess", error)
            raise
        finally:
            self.request_history.totals.tokenized += 1
            times.ended = perf_counter()


class ObservedRouter(RouterClient):
    """Counts routing decisions and requests an explanation of some."""

    request_history: RequestHistory | None = None
    explanations: RoutingExplanations | None = None

    async def route(self, request_id: str, *args: Any, **more: Any) -> Route:
        if self.request_history is None or self.explanations is None:
            return await super().route(request_id, *args, **more)
        self.request_history.totals.decisions += 1
        try:
            route = await super().route(request_id, *args, **more, explain=self.explanations.wanted())
        except SluiceError as error:
            _count_failure(self.request_history, "router", error)
            raise
        if route.scores:
            self.explanations.record(request_id, route)
        return route


class ObservedStreamManager(StreamManager):
    """Records the start and end of streams."""

    request_history: RequestHistory | None = None

    def connect(self, *args: Any, **more: Any) -> GenerationStream:
        stream = super().connect(*args, **more)
        if self.request_history is not None and stream.worker is not None:
            self.request_history.began(stream, stream.worker.worker_id)
        return stream

    def cancel(self, stream: GenerationStream) -> None:
        if self.request_history is not None:
            self.request_history.ended(stream, "cancelled")
        super().cancel(stream)

    def give_up(self, stream: GenerationStream, error: SluiceError) -> None:
        if self.request_history is not None:
            self.request_history.ended(stream, error.code or error.kind.name.lower())
        super().give_up(stream, error)

    def on_finished(self, stream: GenerationStream, finish: Finish) -> None:
        live = stream.slot in self._streams
        super().on_finished(stream, finish)
        if self.request_history is not None and live:
            self.request_history.ended(stream, "finished")


def _count_failure(request_history: RequestHistory, service: str, error: SluiceError) -> None:
    """Counts failures caused by the service, not by the client."""
    if error.http_status >= 500:
        request_history.failures[service] += 1
