"""The engine's own Prometheus metrics on the worker's endpoint."""

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
    """Reads the engine's metrics at every scrape and passes them on under their own names.

    Args:
        text: the metrics in Prometheus' text format; called from the scraping thread.
        registry: where the worker's metrics are; prometheus_client's own by default.
    """

    def __init__(self, text: Callable[[], str], registry: CollectorRegistry = REGISTRY) -> None:
        self._text = text
        self._registry = registry
        self._asking = threading.local()
        self._complained = False
        self._registered = False

    def register(self) -> None:
        """From now on scrapes include them."""
        self._registry.register(self)
        self._registered = True

    def close(self) -> None:
        """Scrapes include them no more; may be called twice, and when they never did."""
        if self._registered:
            self._registered = False
            self._registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before an engine has started."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families of this moment; none when the engine's text is broken."""
        # An engine that keeps its metrics in the registry of this process would ask itself.
        if getattr(self._asking, "now", False):
            return []
        self._asking.now = True
        try:
            return [family for family in text_string_to_metric_families(self._text()) if not self._known(family.name)]
        except Exception as error:
            if not self._complained:
                self._complained = True
                log.warning("the engine's metrics cannot be read: %s", error)
            return []
        finally:
            self._asking.now = False

    def _known(self, name: str) -> bool:
        """A name that the endpoint has already must not appear twice."""
        taken: dict[str, object] = getattr(self._registry, "_names_to_collectors", {})
        return name.startswith(OURS) or name in taken
