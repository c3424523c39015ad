"""Every instrument is declared once, with its meaning and its labels, and made from that.

A service's `metrics.py` holds a `Catalogue` and one declaration for each instrument; docs/metrics.md, the alert rules
and the dashboards are checked against them. Labels are bounded here, whatever is recorded: a value that is not among
the declared ones, or comes when there are enough, counts as "other".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from opentelemetry.metrics import CallbackOptions, Observation

from services.common import telemetry
from services.common.errors import ErrorKind
from services.common.label_bounds import NO_LABELS, Label, LabelBounds

Observe = Callable[[], Iterable[tuple[float, Mapping[str, str]]]]
Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for what usually takes milliseconds."""
LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets for whole requests."""

MODEL = Label("model", "served model", most=100)
ERROR_KINDS = tuple(kind.name.lower() for kind in ErrorKind)

MOST_ZEROS = 100
_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


@dataclass(frozen=True, slots=True)
class Declared:
    """One instrument.

    Attributes:
        name: as OpenTelemetry knows it; `exposed` is what Prometheus sees.
        unit: "s", "By" or empty for a number of things.
        when: what must be the case for it to appear at all; empty: it appears in every process of the service that
            has worked.
        together: how surplus label values of a gauge become one: their sum, or the highest.
    """

    service: str
    name: str
    kind: Kind
    meaning: str
    labels: tuple[Label, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    when: str = ""
    together: Literal["sum", "max"] = "sum"

    @property
    def exposed(self) -> str:
        """Name on the Prometheus endpoint; a histogram has _bucket, _count and _sum after it."""
        suffix = _SUFFIXES.get(self.unit, "")
        bare = self.name.removesuffix("_total")
        if not bare.endswith(suffix):
            bare += suffix
        return f"{bare}_total" if self.kind == "counter" else bare


class Counter:
    """Counts up; starts at zero for every combination of labels that is known in advance.

    Counts are kept here and read on scrape: an addition costs a fraction of what OpenTelemetry's own counters do.
    """

    def __init__(self, declared: Declared) -> None:
        self._bounds = LabelBounds(declared.labels)
        self._counts = {tuple(labels.values()): 0.0 for labels in _known(declared.labels)}
        self._lock = threading.Lock()
        watch(declared, self._read)

    def add(self, amount: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        """Adds to what these labels have; may be called from any thread."""
        key = self._bounds.values(labels)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def _read(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        with self._lock:
            counts = list(self._counts.items())
        return [(count, self._bounds.labelled(key)) for key, count in counts]


class Level(Counter):
    """Goes up and down with what comes (+) and goes (-)."""


class Histogram:
    """How values are spread over the declared buckets."""

    def __init__(self, declared: Declared) -> None:
        self._record = (
            telemetry.meter(declared.service)
            .create_histogram(
                declared.name,
                declared.unit,
                declared.meaning,
                explicit_bucket_boundaries_advisory=list(declared.buckets),
            )
            .record
        )
        self._bounds = LabelBounds(declared.labels)

    def record(self, value: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        """One value."""
        self._record(value, self._bounds.labelled(self._bounds.values(labels)))


def _known(labels: Sequence[Label]) -> Iterable[dict[str, str]]:
    """All combinations of label values, if they are few and declared."""
    combinations = 1
    for label in labels:
        combinations *= len(label.expected)
    if not 0 < combinations <= MOST_ZEROS:
        return
    for values in product(*(label.expected for label in labels)):
        yield {label.name: value for label, value in zip(labels, values, strict=True)}


class Catalogue:
    """The instruments of one service; names start with ``sluice_<service>_``."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.declared: list[Declared] = []

    def counter(self, name: str, meaning: str, *labels: Label, unit: str = "", when: str = "") -> Declared:
        """Declares what only grows; `Counter` makes it, or `watch` when something else keeps the count."""
        return self._declare(name, "counter", meaning, labels, unit, (), when)

    def gauge(
        self,
        name: str,
        meaning: str,
        *labels: Label,
        unit: str = "",
        when: str = "",
        together: Literal["sum", "max"] = "sum",
    ) -> Declared:
        """Declares what goes up and down; `Level` makes it, or `watch` when it is read on scrape."""
        return self._declare(name, "gauge", meaning, labels, unit, (), when, together)

    def histogram(
        self,
        name: str,
        meaning: str,
        *labels: Label,
        unit: str = "s",
        buckets: Sequence[float] = SECONDS,
        when: str = "",
    ) -> Declared:
        """Declares a distribution; `Histogram` makes it."""
        return self._declare(name, "histogram", meaning, labels, unit, tuple(buckets), when)

    def _declare(
        self,
        name: str,
        kind: Kind,
        meaning: str,
        labels: tuple[Label, ...],
        unit: str,
        buckets: tuple[float, ...],
        when: str,
        together: Literal["sum", "max"] = "sum",
    ) -> Declared:
        full = f"sluice_{self.service}_{name}"
        declared = Declared(self.service, full, kind, meaning, labels, unit, buckets, when, together)
        self.declared.append(declared)
        return declared


def watch(declared: Declared, observe: Observe) -> None:
    """Reads a gauge or a counter whenever metrics are collected; `observe` is called from the scraping thread."""
    fold = max if declared.together == "max" else float.__add__

    def collect(_: CallbackOptions) -> Iterable[Observation]:
        bounds = LabelBounds(declared.labels)  # of this moment only: what is gone makes room
        found: dict[tuple[str, ...], float] = {}
        for value, labels in observe():
            key = bounds.values(labels)
            found[key] = fold(found[key], float(value)) if key in found else float(value)
        return [Observation(value, bounds.labelled(key)) for key, value in found.items()]

    meter = telemetry.meter(declared.service)
    create = meter.create_observable_counter if declared.kind == "counter" else meter.create_observable_gauge
    create(declared.name, [collect], declared.unit, declared.meaning)
