"""Which cells to run: options of the command line, and why some cannot run here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.breaks import BREAKS, NOTHING, Break
from tests.support.faults.fault import Fault
from tests.support.faults.host import Host
from tests.support.faults.injections import CLOCK, FAULTS
from tests.support.faults.load import Load
from tests.support.faults.loads import LOADS
from tests.support.faults.parts import PARTS, Part, loads_of
from tests.support.faults.row import Row


class UnknownNameError(ValueError):
    """An unknown part, fault, load or break; the sentence names the known ones."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A row to run."""

    part: Part
    fault: Fault
    loads: tuple[type[Load], ...]
    not_run: str = ""

    @property
    def suite(self) -> tuple[str, bool]:
        """The topology of its suite, and whether processes have clocks of their own."""
        return self.fault.topology or self.part.topology, CLOCK in self.fault.needs

    @property
    def skipped(self) -> Row:
        """The row of one that cannot run."""
        return Row(self.part.name, self.fault.name, not_run=self.not_run)


def known(kind: str, names: Sequence[str], every: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the names, or every one if none is given.

    Raises:
        UnknownNameError: one is unknown.
    """
    for name in names:
        if name not in every:
            raise UnknownNameError(f"Unknown {kind} {name!r}; choose from {', '.join(every)}.")
    return tuple(name for name in every if name in names) if names else tuple(every)


def planned(
    parts: Sequence[str], faults: Sequence[str], loads: Sequence[str], host: Host, other: Path | None = None
) -> list[Planned]:
    """Returns the rows to run, those of one suite after each other, and those that cannot run.

    Raises:
        UnknownNameError: a name is unknown, or no fault concerns any of the parts.
    """
    found = []
    chosen = known("load", loads, LOADS)
    for part in (PARTS[name] for name in known("part", parts, PARTS)):
        for fault in (FAULTS[name] for name in known("fault", faults, FAULTS)):
            topology = fault.topology or part.topology
            kinds = tuple(LOADS[name] for name in loads_of(topology, chosen))
            if fault.concerns(part) and kinds:
                found.append(Planned(part, fault, kinds, fault.not_run(part, host, other)))
    if not found:
        raise UnknownNameError("None of these faults happens to these parts under these loads.")
    order = list(dict.fromkeys(row.suite for row in found))
    return sorted(found, key=lambda row: order.index(row.suite))


def broken(names: Sequence[str]) -> list[Break]:
    """Returns the suites to run: those that are deliberately wrong, all of them for `all`, or the right one.

    Raises:
        UnknownNameError: a name is unknown.
    """
    if not names:
        return [NOTHING]
    return [BREAKS[name] for name in known("break", [name for name in names if name != "all"], BREAKS)]


def missing(rows: Collection[Planned]) -> list[str]:
    """Returns a sentence for each reason why rows cannot run, and one with how many can."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.not_run:
            reasons.setdefault(row.not_run, []).append(f"{row.part.name}/{row.fault.name}")
    able = sum(len(row.loads) for row in rows if not row.not_run)
    sentences = [f"Not run, {reason}: {', '.join(names)}." for reason, names in reasons.items()]
    return [*sentences, f"{able} cells run."] if sentences else []
