"""Keeps the labels of an instrument within bounds, whatever values come."""

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
    """One label.

    Attributes:
        values: all it can be; anything else counts as "other". Empty: whatever comes.
        most: with `values` empty, how many different ones are kept; those that come later count as "other".
        rare: of `values` unknown in advance none may ever come; its counter starts at zero with "other", to be there.
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
    """The labels as they are recorded, for one instrument; may be called from any thread.

    A set of labels that was recorded before costs one look-up.
    """

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = tuple(labels)
        self._names = tuple(label.name for label in labels)
        self._closed = {label.name: frozenset(label.values) for label in labels if label.values}
        self._open: dict[str, set[str]] = {label.name: set() for label in labels if not label.values}
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def values(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Bounded values in the declared order; a missing one is empty."""
        wanted = tuple([labels.get(name, "") for name in self._names])
        known = self._known.get(wanted)
        return known if known is not None else self._bounded(wanted)

    def labelled(self, values: tuple[str, ...]) -> dict[str, str]:
        """The same with their names."""
        return dict(zip(self._names, values, strict=True))

    def _bounded(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        with self._lock:
            kept = tuple(self._kept(label, value) for label, value in zip(self._labels, wanted, strict=True))
            return self._known.setdefault(kept, kept)

    def _kept(self, label: Label, value: str) -> str:
        closed = self._closed.get(label.name)
        if closed is not None:
            return value if value in closed else OTHER
        seen, text = self._open[label.name], value[:LONGEST]
        if text not in seen:
            if len(seen) >= label.most:
                return OTHER
            seen.add(text)
        return text
