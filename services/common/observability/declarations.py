"""Declarations of metrics: each instrument's name, meaning and labels, from which `instruments` creates it.

A service's `metrics.py` holds a `MetricDeclarations` and one declaration per instrument; docs/metrics.md, the alert
rules and the dashboards are checked against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.base.errors import ErrorKind
from services.common.observability.label_bounds import Label

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for durations in the range of milliseconds."""
LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets for entire requests."""

MODEL = Label("model", "served model", most=100)
ERROR_KINDS = tuple(kind.name.lower() for kind in ErrorKind)

_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of one instrument.

    Attributes:
        name: without unit and _total; `exposed` is the name in Prometheus.
        unit: "s", "By" or empty for a count.
        when: the condition under which it is exposed; empty: in every process of the service that has handled work.
        together: how a gauge combines surplus label values into "other": their sum, or the highest.
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
        """The name on the Prometheus endpoint; histograms append _bucket, _count and _sum to it."""
        suffix = _SUFFIXES.get(self.unit, "")
        base = self.name.removesuffix("_total")
        if not base.endswith(suffix):
            base += suffix
        return f"{base}_total" if self.kind == "counter" else base


class MetricDeclarations:
    """The instruments of one service; their names start with ``sluice_<service>_``."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.declared: list[Declared] = []

    def counter(self, name: str, meaning: str, *labels: Label, unit: str = "", when: str = "") -> Declared:
        """Declares a value that only grows; created by `Counter`, or by `watch` when it is read on scrape."""
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
        """Declares a value that goes up and down; created by `Gauge`, or by `watch` when it is read on scrape."""
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
        """Declares a distribution; created by `Histogram`."""
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
