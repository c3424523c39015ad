"""Clients of preprocess and the router that record their calls for the live view."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from services.common.base.errors import SluiceError
from services.gateway.apis.live_view.request_history import RequestHistory
from services.gateway.apis.live_view.routing_explanations import RoutingExplanations
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.core import context
from services.gateway.core.context import PromptTimes
from services.gateway.core.request import Route, TokenizedPrompt


class ObservedPreprocess(PreprocessClient):
    """Records the duration and failures of tokenization."""

    def __init__(self, request_history: RequestHistory, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._request_history = request_history

    async def tokenize(self, *args: Any, **more: Any) -> TokenizedPrompt:
        started_at = perf_counter()
        try:
            return await super().tokenize(*args, **more)
        except SluiceError as error:
            _count_failure(self._request_history, "preprocess", error)
            raise
        finally:
            self._request_history.totals.tokenized += 1
            context.enter(context.current()._replace(prompt_times=PromptTimes(started_at, perf_counter())))


class ObservedRouter(RouterClient):
    """Counts routing decisions and requests an explanation of some."""

    def __init__(
        self, request_history: RequestHistory, explanations: RoutingExplanations, *args: Any, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._request_history = request_history
        self._explanations = explanations

    async def route(self, request_id: str, *args: Any, **more: Any) -> Route:
        self._request_history.totals.decisions += 1
        try:
            explain = self._explanations.wanted() or more.pop("explain", False)
            route = await super().route(request_id, *args, **more | {"explain": explain})
        except SluiceError as error:
            _count_failure(self._request_history, "router", error)
            raise
        if route.scores:
            self._explanations.record(request_id, route)
        return route


def _count_failure(request_history: RequestHistory, service: str, error: SluiceError) -> None:
    """Counts failures caused by the service, not by the client."""
    if error.http_status >= 500:
        request_history.failures[service] += 1
