"""The interface of an extension that observes a gateway and shows it: an entry point of the group `sluice.observers`.

The entry point is a class without parameters. A gateway with --ui uses the first one by name; the suite's own is the
live view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fastapi import FastAPI

from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.pipeline.stages import Components
from services.gateway.streams.interfaces import StreamObserver


class GatewayObserver(Protocol):
    """Observes one gateway process. The calls come in the order of the methods, each once.

    Attributes:
        streams: observes the streams.
    """

    streams: StreamObserver

    def preprocess_client(self) -> Callable[..., PreprocessClient]:
        """Returns what creates the client of preprocess, with the parameters of `PreprocessClient`."""

    def router_client(self) -> Callable[..., RouterClient]:
        """Returns what creates the client of the router, with the parameters of `RouterClient`."""

    def connect(self, components: Components, router: RouterClient) -> None:
        """Is called with the components of the process, before they are started."""

    def add_routes(self, app: FastAPI) -> None:
        """Adds routes to the HTTP application."""

    async def run(self) -> None:
        """Runs until it is cancelled."""

    def close(self) -> None:
        """Ends its responses, before the HTTP server stops."""
