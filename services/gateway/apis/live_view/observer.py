"""The live view as an extension of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import FastAPI

from services.gateway.apis.live_view.endpoints import add_live_view
from services.gateway.apis.live_view.observers import ObservedPreprocess, ObservedRouter
from services.gateway.apis.live_view.view import LiveView, LiveViewRecords
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.pipeline.stages import Components


class LiveViewObserver:
    """See `GatewayObserver`; holds the records until the components to sample exist."""

    def __init__(self) -> None:
        self._records = LiveViewRecords()
        self._view: LiveView | None = None
        self.streams = self._records.request_history

    def preprocess_client(self) -> Callable[..., PreprocessClient]:
        """See GatewayObserver."""
        return partial(ObservedPreprocess, self._records.request_history)

    def router_client(self) -> Callable[..., RouterClient]:
        """See GatewayObserver."""
        return partial(ObservedRouter, self._records.request_history, self._records.explanations)

    def connect(self, components: Components, router: RouterClient) -> None:
        """See GatewayObserver."""
        self._view = LiveView(
            self._records,
            components.preprocess,
            router,
            components.stream_manager,
            components.registry,
            components.connections,
        )

    @property
    def view(self) -> LiveView:
        """The view; exists once the components are connected."""
        assert self._view is not None
        return self._view

    def add_routes(self, app: FastAPI) -> None:
        """See GatewayObserver."""
        add_live_view(app, self.view)

    async def run(self) -> None:
        """See GatewayObserver."""
        await self.view.run()

    def close(self) -> None:
        """See GatewayObserver."""
        self.view.close()
