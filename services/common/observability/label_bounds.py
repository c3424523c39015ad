"""Bounds the number and length of the label values of an instrument."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

OTHER = "other"
NO_LABELS: Mapping[str, str] = MappingProxyType({})
LONGEST = 200


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric.

    Attributes:
        values: all values it can have; others count as "other". Empty: any value.
        most: with `values` empty, the maximum number of different values; later ones count as "other".
        rare: its values are unknown in advance and may never occur; its counter starts at zero with "other" so that it
            is exposed.
    """

    name: str
    meaning: str
    values: tuple[str, ...] = ()
    most: int = 50
    rare: bool = False

    @property
    def expected(self) -> tuple[str, ...]:
        """Values that a counter starts with."""
        return self.values or ((OTHER,) if self.rare else ())


class LabelBounds:
    """Maps the label values of one instrument to bounded ones; thread-safe.

    A combination of values that was recorded before costs one look-up.
    """

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = tuple(labels)
        self._names = tuple(label.name for label in labels)
        self._missing = ("",) * len(self._names)
        self._closed = {label.name: frozenset(label.values) for label in labels if label.values}
        self._open: dict[str, set[str]] = {label.name: set() for label in labels if not label.values}
        self._recorded: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def values(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Returns the bounded values in declared order; a missing one is empty."""
        given = tuple(map(labels.get, self._names, self._missing))
        return self._recorded[given] if given in self._recorded else self._bounded(given)

    def _bounded(self, given: tuple[str, ...]) -> tuple[str, ...]:
        with self._lock:
            bounded = tuple(self._bounded_value(label, value) for label, value in zip(self._labels, given, strict=True))
            return self._recorded.setdefault(bounded, bounded)

    def _bounded_value(self, label: Label, value: str) -> str:
        closed = self._closed.get(label.name)
        if closed is not None:
            return value if value in closed else OTHER
        values, text = self._open[label.name], value[:LONGEST]
        if text not in values:
            if len(values) >= label.most:
                return OTHER
            values.add(text)
        return text
