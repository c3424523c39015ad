"""The live view of one gateway: samples its state once a second and sends it to all viewers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Any

from services.common.base.errors import SluiceError
from services.gateway.apis.live_view.feed import Feed
from services.gateway.apis.live_view.rates import RateMeter
from services.gateway.apis.live_view.request_history import Finished, RequestHistory
from services.gateway.apis.live_view.routing_explanations import RoutingExplanations
from services.gateway.apis.live_view.state import Node, ViewState
from services.gateway.apis.live_view.worker_table import LinkState, WorkerTable
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.overview import WorkerState, worker_states
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.streams.manager import StreamManager
from sluice import __version__

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
ROUTER_TIMEOUT_S = 0.8
MAX_VIEWERS = 16
"""Open pages of the live view; more are OVERLOADED."""


class LiveViewRecords:
    """Holds what the live view shows: observers add to it, `LiveView` publishes it.

    Attributes:
        request_history: observes the streams of the gateway.
        explanations: of some of the router's decisions, while a page is open.
    """

    def __init__(self) -> None:
        self.request_history = RequestHistory()
        self.worker_table = WorkerTable(self.request_history)
        self.feed = Feed(MAX_VIEWERS, lambda: self.state.whole_event())
        self.explanations = RoutingExplanations(lambda: self.feed.viewers > 0)
        self.state = ViewState(self.request_history, RateMeter(), self.worker_table, self.explanations, __version__)


class LiveView:
    """Samples the gateway's state every second. Queries the router only while a page is open."""

    def __init__(
        self,
        records: LiveViewRecords,
        preprocess: PreprocessClient,
        router: RouterClient,
        stream_manager: StreamManager,
        registry: WorkerRegistry,
        connections: ConnectionManager,
    ) -> None:
        self._preprocess = preprocess
        self._router = router
        self._stream_manager = stream_manager
        self._registry = registry
        self._connections = connections
        self._request_history, self._worker_table = records.request_history, records.worker_table
        self._feed, self._state = records.feed, records.state
        self._sampled_at = monotonic()
        self._worker_states: Sequence[WorkerState] = ()
        self._sampled = asyncio.Event()
        self._snapshots_pending = 0

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._feed.viewers or self._snapshots_pending:
                await self._query_router()
            self._sample()

    def events(self) -> AsyncIterator[bytes]:
        """Returns the event stream of a new viewer; raises SluiceError if there are too many."""
        return self._feed.join()

    async def snapshot(self) -> dict[str, Any]:
        """Returns the whole state after the next sample; frequent calls cause no additional samples."""
        self._snapshots_pending += 1
        try:
            await self._sampled.wait()
        finally:
            self._snapshots_pending -= 1
        return self._state.whole()

    def request(self, request_id: str) -> Finished | None:
        """Returns one of the last requests by the id of its response."""
        recent = reversed(self._request_history.recent)
        return next((finished for finished in recent if finished.id == request_id), None)

    def close(self) -> None:
        """Ends all streams."""
        self._feed.close()
        self._sampled.set()

    async def _query_router(self) -> None:
        try:
            self._worker_states = await worker_states(self._router.replicas, ROUTER_TIMEOUT_S)
        except SluiceError as error:
            log.debug("could not fetch the states of workers from the router: %s", error.message)

    def _sample(self) -> None:
        now = monotonic()
        elapsed_s, self._sampled_at = max(now - self._sampled_at, 0.05), now
        links = self._links()
        self._worker_table.update(
            links, [state for state in self._worker_states if state.id in links or state.draining], elapsed_s
        )
        failures = self._request_history.take_failures()
        nodes = {
            name: Node(sorted(replica.address for replica in replicas.serving), replicas.away, failures[name])
            for name, replicas in (
                ("preprocess", self._preprocess.replicas),
                ("router", self._router.replicas),
                ("postprocess", self._connections.postprocess),
            )
        }
        models = list(self._registry.models)
        self._feed.publish(self._state.next_event(nodes, models, self._stream_manager.live, elapsed_s))
        sampled, self._sampled = self._sampled, asyncio.Event()
        sampled.set()

    def _links(self) -> dict[str, LinkState]:
        links = {}
        for worker_id, entry in self._registry.workers.items():
            link = self._connections.find(worker_id)
            links[worker_id] = LinkState(
                address=entry.address,
                model=entry.model,
                connected=link is not None and link.connected,
                healthy=link is None or link.breaker.closed,
                live=0 if link is None else link.live,
            )
        return links
