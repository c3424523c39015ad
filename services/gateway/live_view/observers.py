"""The gateway's parts, wrapped so that a ledger hears of what passes through them; without one they are as ever."""

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
    """Says how long prompts take, and whether they fail."""

    request_history: RequestHistory | None = None

    async def tokenize(self, *args: Any, **more: Any) -> TokenizedPrompt:
        """As the client's own."""
        if self.request_history is None:
            return await super().tokenize(*args, **more)
        times = PromptTimes(perf_counter())
        prompt_times.set(times)
        try:
            return await super().tokenize(*args, **more)
        except SluiceError as error:
            _note(self.request_history, "preprocess", error)
            raise
        finally:
            self.request_history.totals.tokenized += 1
            times.answered = perf_counter()


class ObservedRouter(RouterClient):
    """Counts decisions, and has one of them explained now and then."""

    request_history: RequestHistory | None = None
    explanations: RoutingExplanations | None = None

    async def route(self, request_id: str, *args: Any, **more: Any) -> Route:
        """As the client's own."""
        if self.request_history is None or self.explanations is None:
            return await super().route(request_id, *args, **more)
        self.request_history.totals.decisions += 1
        try:
            route = await super().route(request_id, *args, **more, explain=self.explanations.wanted())
        except SluiceError as error:
            _note(self.request_history, "router", error)
            raise
        if route.scores:
            self.explanations.keep(request_id, route)
        return route


class ObservedStreamManager(StreamManager):
    """Tells when streams begin and how they end."""

    request_history: RequestHistory | None = None

    def connect(self, *args: Any, **more: Any) -> GenerationStream:
        """As the switchboard's own."""
        stream = super().connect(*args, **more)
        if self.request_history is not None and stream.worker is not None:
            self.request_history.began(stream, stream.worker.worker_id)
        return stream

    def cancel(self, stream: GenerationStream) -> None:
        """As the switchboard's own."""
        if self.request_history is not None:
            self.request_history.over(stream, "cancelled")
        super().cancel(stream)

    def give_up(self, stream: GenerationStream, error: SluiceError) -> None:
        """As the switchboard's own."""
        if self.request_history is not None:
            self.request_history.over(stream, error.code or error.kind.name.lower())
        super().give_up(stream, error)

    def on_finished(self, stream: GenerationStream, finish: Finish) -> None:
        """As the switchboard's own."""
        live = stream.slot in self._streams
        super().on_finished(stream, finish)
        if self.request_history is not None and live:
            self.request_history.over(stream, "finished")


def _note(request_history: RequestHistory, service: str, error: SluiceError) -> None:
    """Counts what is the service's fault, not the caller's."""
    if error.http_status >= 500:
        request_history.troubled[service] += 1
