"""State of the page as JSON: the whole state once, then the changes of each second."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.apis.live_view.rates import RateMeter, Rates
from services.gateway.apis.live_view.request_history import RequestHistory
from services.gateway.apis.live_view.routing_explanations import Explanation, RoutingExplanations
from services.gateway.apis.live_view.worker_table import WorkerRow, WorkerTable

MAX_REQUESTS = 40
"""Completed requests that a page is sent when it opens; older ones are left out."""
DEGRADED_WINDOW_S = 60


@dataclass(frozen=True, slots=True)
class Node:
    """The replicas of one service.

    Attributes:
        serving: addresses of serving replicas.
        away: configured addresses that do not serve.
        troubled: failed calls in the last second.
    """

    serving: Sequence[str]
    away: Sequence[str] = ()
    troubled: int = 0


class ViewState:
    """Collects and encodes the state and its changes."""

    def __init__(
        self,
        request_history: RequestHistory,
        meter: RateMeter,
        worker_table: WorkerTable,
        explanations: RoutingExplanations,
        version: str,
    ) -> None:
        self._request_history = request_history
        self._meter = meter
        self._worker_table = worker_table
        self._explanations = explanations
        self._version = version
        self._number = 0
        self._nodes: dict[str, Node] = {}
        self._rows: dict[str, WorkerRow] = {}
        self._explained: Explanation | None = None
        self._degraded: deque[Counter[str]] = deque(maxlen=DEGRADED_WINDOW_S)
        self._degraded_totals: dict[str, int] = {}
        self._models: list[str] = []

    def whole(self) -> dict[str, Any]:
        """Returns the whole state."""
        return {
            "n": self._number,
            "unix_ms": int(time.time() * 1000),
            "version": self._version,
            "models": self._models,
            "nodes": self._nodes,
            "rates": self._meter.history[-1] if self._meter.history else Rates(),
            "history": _columns(self._meter.history),
            "workers": list(self._rows.values()),
            "hidden_workers": len(self._worker_table.rows) - len(self._rows),
            "requests": list(self._request_history.recent)[-MAX_REQUESTS:],
            "degraded": self._degraded_totals,
            "why": self._explained,
        }

    def whole_event(self) -> bytes:
        """Returns the whole state as an event of the stream."""
        return b"event: whole\ndata: " + orjson.dumps(self.whole()) + b"\n\n"

    def next_event(self, nodes: Mapping[str, Node], models: list[str], live: int, elapsed_s: float) -> bytes:
        """Returns the changes since the last call as an event of the stream."""
        self._number += 1
        delta: dict[str, Any] = {"n": self._number, "unix_ms": int(time.time() * 1000)}
        self._request_history.meter()
        delta["rates"] = self._meter.sample(self._request_history.totals, live, elapsed_s)
        delta |= self._changed_nodes(nodes, models) | self._changed_rows() | self._changed_degraded()
        if finished := self._request_history.take_new():
            delta["requests"] = finished
        if self._explanations.last is not self._explained:
            delta["why"] = self._explained = self._explanations.last
        return b"data: " + orjson.dumps(delta) + b"\n\n"

    def _changed_nodes(self, nodes: Mapping[str, Node], models: list[str]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        if nodes != self._nodes:
            changed["nodes"] = self._nodes = dict(nodes)
        if models != self._models:
            changed["models"] = self._models = models
        return changed

    def _changed_rows(self) -> dict[str, Any]:
        previous, self._rows = self._rows, self._worker_table.shown()
        rows = [row for worker_id, row in self._rows.items() if previous.get(worker_id) != row]
        removed = [worker_id for worker_id in previous if worker_id not in self._rows]
        changed: dict[str, Any] = {"workers": rows} if rows else {}
        if removed:
            changed["left"] = removed
        hidden = len(self._worker_table.rows) - len(self._rows)
        return changed | {"hidden_workers": hidden} if hidden else changed

    def _changed_degraded(self) -> dict[str, Any]:
        self._degraded.append(self._request_history.take_degraded())
        total: Counter[str] = Counter()
        for counted in self._degraded:
            total.update(counted)
        if total == self._degraded_totals:
            return {}
        self._degraded_totals = dict(total)
        return {"degraded": self._degraded_totals}


def _columns(history: Sequence[Rates] | deque[Rates]) -> dict[str, list[float]]:
    """Returns the values for the charts."""
    return {
        name: [getattr(rates, name) for rates in history] for name in ("requests", "output_tokens", "live", "failed")
    }
