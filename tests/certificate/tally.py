"""Counts verdicts and reasons, and keeps examples of what is not explained."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.certificate.comparison import Comparison, Verdict
from tests.certificate.explaining import Reason

MAX_EXAMPLES = 3
FINE = (Verdict.EQUAL, Verdict.BOTH_REFUSE)

Key = tuple[str, str, str, str]
"""Engine, subject, API, feature."""


@dataclass
class Counts:
    """Of one engine with one template and feature."""

    equal: int = 0
    different: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    unexplained: int = 0


class Tally:
    """The results of a run."""

    def __init__(self) -> None:
        self.cells: dict[Key, Counts] = defaultdict(Counts)
        self.reasons: Counter[str] = Counter()
        self.unexplained: dict[tuple[str, ...], list[Comparison]] = defaultdict(list)
        self.unexplained_count = 0
        self.lost: list[Comparison] = []

    def add(self, comparison: Comparison, reasons: Iterable[Reason]) -> None:
        """Counts a comparison; a difference without reasons is not explained."""
        cell = comparison.case.cell
        counts = self.cells[comparison.engine, cell.subject, cell.api, cell.feature]
        if comparison.verdict is Verdict.EQUAL:
            counts.equal += 1
            return
        if comparison.verdict is Verdict.BOTH_REFUSE:
            counts.refused += 1
            return
        counts.different += 1
        if comparison.lost and not comparison.degraded:
            self.lost.append(comparison)
        names = [reason.name for reason in reasons]
        counts.reasons.update(names)
        self.reasons.update(names)
        if not names:
            counts.unexplained += 1
            self.unexplained_count += 1
            kind = (comparison.engine, comparison.verdict.value, cell.api, cell.feature, ",".join(comparison.fields))
            self.unexplained[kind].append(comparison)

    def total(self, engine: str) -> Counts:
        """Returns the sums of an engine."""
        total = Counts()
        for (name, *_), counts in self.cells.items():
            if name == engine:
                total.equal += counts.equal
                total.different += counts.different
                total.refused += counts.refused
                total.unexplained += counts.unexplained
        return total
