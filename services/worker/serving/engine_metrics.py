"""Exposes the engine's Prometheus metrics on the worker's metrics endpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

log = logging.getLogger(__name__)

OURS = ("sluice_", "python_", "process_", "target_info")


class EngineMetrics(Collector):
    """Reads the engine's metrics at every scrape and exposes them under their original names.

    Args:
        text: returns the metrics in the Prometheus text format; called from the scraping thread.
        registry: the registry of the worker's metrics.
    """

    def __init__(self, text: Callable[[], str], registry: CollectorRegistry = REGISTRY) -> None:
        self._text = text
        self._registry = registry
        self._collecting = threading.local()
        self._warned = False
        self._registered = False

    def register(self) -> None:
        """Includes the engine's metrics in scrapes."""
        self._registry.register(self)
        self._registered = True

    def close(self) -> None:
        """Removes the engine's metrics from scrapes; idempotent."""
        if self._registered:
            self._registered = False
            self._registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics are unknown before the engine has started."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Returns the current metric families; none when the engine's text cannot be parsed."""
        # Break the recursion: an engine that uses this process's registry collects this collector again.
        if getattr(self._collecting, "now", False):
            return []
        self._collecting.now = True
        try:
            return [
                family for family in text_string_to_metric_families(self._text()) if not self._is_taken(family.name)
            ]
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning("engine metrics cannot be read: %s", error)
            return []
        finally:
            self._collecting.now = False

    def _is_taken(self, name: str) -> bool:
        """Whether the endpoint already exposes this name, which must not appear twice."""
        taken: dict[str, object] = getattr(self._registry, "_names_to_collectors", {})
        return name.startswith(OURS) or name in taken
