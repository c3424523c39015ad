"""The live view of one gateway: looks once a second and tells everybody who watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Any

from services.common.errors import SluiceError
from services.gateway.live_view.feed import Feed
from services.gateway.live_view.observers import ObservedPreprocess, ObservedRouter, ObservedStreamManager
from services.gateway.live_view.rates import RateMeter
from services.gateway.live_view.request_history import Finished, RequestHistory
from services.gateway.live_view.routing_explanations import RoutingExplanations
from services.gateway.live_view.state import Node, State
from services.gateway.live_view.worker_table import LinkState, WorkerTable
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.overview import WorkerState, worker_states
from services.gateway.workers.registry import WorkerRegistry
from sluice import __version__

log = logging.getLogger(__name__)

EVERY_S = 1.0
ASK_S = 0.8


class LiveView:
    """Makes the gateway's parts tell what passes through them. Without viewers, sends no router queries.

    Args:
        most_viewers: pages open at once; more are refused.
    """

    def __init__(
        self,
        preprocess: ObservedPreprocess,
        router: ObservedRouter,
        stream_manager: ObservedStreamManager,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        most_viewers: int,
    ) -> None:
        self._preprocess = preprocess
        self._router = router
        self._stream_manager = stream_manager
        self._registry = registry
        self._connections = connections
        self._request_history = preprocess.request_history = router.request_history = stream_manager.request_history = (
            RequestHistory()
        )
        self._worker_table = WorkerTable(self._request_history)
        self._feed = Feed(most_viewers, lambda: self._state.whole_event())
        explanations = router.explanations = RoutingExplanations(lambda: self._feed.viewers > 0)
        self._state = State(self._request_history, RateMeter(), self._worker_table, explanations, __version__)
        self._looked_at = monotonic()
        self._told: Sequence[WorkerState] = ()
        self._looked = asyncio.Event()
        self._waiting = 0

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self._feed.viewers or self._waiting:
                await self._ask()
            self._look()

    def events(self) -> AsyncIterator[bytes]:
        """One viewer's stream; SluiceError when there are too many."""
        return self._feed.join()

    async def snapshot(self) -> dict[str, Any]:
        """Everything there is to show, after the next look: asking often costs no more looks."""
        self._waiting += 1
        try:
            await self._looked.wait()
        finally:
            self._waiting -= 1
        return self._state.whole()

    def request(self, request_id: str) -> Finished | None:
        """One of the last requests, by the id of its answer."""
        return next((one for one in reversed(self._request_history.recent) if one.id == request_id), None)

    def close(self) -> None:
        """Ends every stream."""
        self._feed.close()
        self._looked.set()

    async def _ask(self) -> None:
        try:
            self._told = await worker_states(self._router.replicas, ASK_S)
        except SluiceError as error:
            log.debug("the router does not say how workers are: %s", error.message)

    def _look(self) -> None:
        now = monotonic()
        elapsed_s, self._looked_at = max(now - self._looked_at, 0.05), now
        links = self._links()
        self._worker_table.update(
            links, [state for state in self._told if state.id in links or state.draining], elapsed_s
        )
        troubled = self._request_history.take_troubled()
        nodes = {
            name: Node(sorted(replica.address for replica in replicas.serving), replicas.away, troubled[name])
            for name, replicas in (
                ("preprocess", self._preprocess.replicas),
                ("router", self._router.replicas),
                ("postprocess", self._connections.postprocess),
            )
        }
        models = list(self._registry.models)
        self._feed.publish(self._state.next_event(nodes, models, self._stream_manager.live, elapsed_s))
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()

    def _links(self) -> dict[str, LinkState]:
        links = {}
        for worker_id, entry in self._registry.workers.items():
            link = self._connections.find(worker_id)
            links[worker_id] = LinkState(
                address=entry.address,
                model=entry.model,
                connected=link is not None and link.connected,
                sound=link is None or link.breaker.closed,
                live=0 if link is None else link.live,
            )
        return links
