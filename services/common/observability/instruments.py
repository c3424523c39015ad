"""Counters, levels and histograms made from their declarations, and read when Prometheus scrapes.

Recording costs about a microsecond, a tenth of what OpenTelemetry's instruments take, so that requests and batches can
be measured wherever it helps. Labels are bounded, whatever is recorded: a value that is not among the declared ones, or
comes when there are enough, counts as "other". All of it may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, product

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from services.common.observability.declarations import Declared
from services.common.observability.label_bounds import NO_LABELS, Label, LabelBounds

log = logging.getLogger(__name__)

Observe = Callable[[], Iterable[tuple[float, Mapping[str, str]]]]
Labels = tuple[str, ...]

MOST_ZEROS = 100


class Instrument(ABC):
    """What is read on scrape."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        _made.add(self)

    @abstractmethod
    def values(self) -> dict[Labels, float]:
        """Now, by the values of the labels; of a histogram, how many were recorded."""

    def family(self) -> Metric:
        """What Prometheus gets."""
        one = self.declared
        kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
        family = kind(one.exposed, one.meaning, labels=[label.name for label in one.labels])
        for labels, value in self.values().items():
            family.add_metric(labels, value)
        return family


class _Made(Collector):
    """The instruments of this process; of two with one name the later one counts."""

    def __init__(self) -> None:
        self._instruments: dict[str, Instrument] = {}
        self._complained: set[str] = set()

    def add(self, instrument: Instrument) -> None:
        self._instruments[instrument.declared.name] = instrument

    def find(self, name: str) -> Instrument | None:
        return self._instruments.get(name)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families = [self._family(instrument) for instrument in list(self._instruments.values())]
        return [family for family in families if family is not None and family.samples]

    def _family(self, instrument: Instrument) -> Metric | None:
        """None when what it watches fails: the others are shown all the same."""
        try:
            return instrument.family()
        except Exception as error:
            name = instrument.declared.name
            if name not in self._complained:
                self._complained.add(name)
                log.warning("metric %s cannot be read", name, exc_info=error)
            return None


_made = _Made()


def expose(registry: CollectorRegistry = REGISTRY) -> None:
    """From now on scrapes of the registry include the instruments; once a registry."""
    registry.register(_made)


def read(name: str) -> dict[Labels, float]:
    """Values of an instrument by its name in the catalogue; empty when nothing was made under it."""
    instrument = _made.find(name)
    return {} if instrument is None else instrument.values()


class Counter(Instrument):
    """Counts up; starts at zero for every combination of labels that is known in advance."""

    def __init__(self, declared: Declared) -> None:
        self._bounds = LabelBounds(declared.labels)
        self._counts = dict.fromkeys(_known(declared.labels), 0.0)
        self._lock = threading.Lock()
        super().__init__(declared)

    def add(self, amount: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        """Adds to what these labels have."""
        key = self._bounds.values(labels)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def values(self) -> dict[Labels, float]:
        """The counts."""
        with self._lock:
            return dict(self._counts)


class Gauge(Counter):
    """Goes up and down with what comes (+) and goes (-)."""


class Histogram(Instrument):
    """How values are spread over the declared buckets."""

    def __init__(self, declared: Declared) -> None:
        self._bounds = LabelBounds(declared.labels)
        self._edges = declared.buckets
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lock = threading.Lock()
        super().__init__(declared)

    def record(self, value: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        """One value."""
        key = self._bounds.values(labels)
        bucket = bisect_left(self._edges, value)
        with self._lock:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(self._edges) + 1)
                self._sums[key] = 0.0
            counts[bucket] += 1
            self._sums[key] += value

    def values(self) -> dict[Labels, float]:
        """How many were recorded."""
        with self._lock:
            return {key: sum(counts) for key, counts in self._counts.items()}

    def family(self) -> Metric:
        """With buckets, as Prometheus adds them up."""
        one = self.declared
        family = HistogramMetricFamily(one.exposed, one.meaning, labels=[label.name for label in one.labels])
        with self._lock:
            rows = [(key, list(counts), self._sums[key]) for key, counts in self._counts.items()]
        edges = [*(str(float(edge)) for edge in self._edges), "+Inf"]
        for key, counts, total in rows:
            family.add_metric(key, list(zip(edges, accumulate(counts), strict=True)), total)
        return family


class _Watched(Instrument):
    def __init__(self, declared: Declared, observe: Observe) -> None:
        self._observe = observe
        super().__init__(declared)

    def values(self) -> dict[Labels, float]:
        fold = max if self.declared.together == "max" else float.__add__
        bounds = LabelBounds(self.declared.labels)  # of this moment only: what is gone makes room
        found: dict[Labels, float] = {}
        for value, labels in self._observe():
            key = bounds.values(labels)
            found[key] = fold(found[key], float(value)) if key in found else float(value)
        return found


def watch(declared: Declared, observe: Observe) -> None:
    """Reads a gauge or a counter whenever metrics are collected; `observe` is called from the scraping thread."""
    _Watched(declared, observe)


def _known(labels: Sequence[Label]) -> list[Labels]:
    """All combinations of label values, if they are few and declared."""
    combinations = 1
    for label in labels:
        combinations *= len(label.expected)
    return list(product(*(label.expected for label in labels))) if combinations <= MOST_ZEROS else []
