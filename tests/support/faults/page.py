"""The fault matrix as a page in Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.faults.breaks import Break
from tests.support.faults.injections import FAULTS
from tests.support.faults.leftovers import Left
from tests.support.faults.loads import LOADS
from tests.support.faults.outcome import Cell
from tests.support.faults.row import Row

HEAD = (
    *("part", "fault", "requests", "failed", "different", "tokens lost", "doubled", "asked again", "moved"),
    *("longest pause, s", "full service, s", "left", "memory, MiB", "verdict"),
)
INTRODUCTION = """\
What clients notice when a part of the suite fails: every fault against every part while all kinds of requests run at
once. `make fault-matrix` starts the suite (two of every tier, on one Redis), asks every request once undisturbed,
repeats them under the fault and compares. The mock engine is deterministic, so equal text, calls, usage and finish
reasons are demanded; of engines whose replayed tokens may round otherwise only "no token lost or doubled, same context"
can be.

- **failed**: an error, or no end within 45 s. **different**: from the undisturbed answer. **tokens lost, doubled**: by
  the usage; words where only the text tells. **asked again**: requests that were cut with the server that the fault
  ended, and repeated at another one. **moved**: generations that went on at another worker, and texts at another
  postprocess replica.
- **longest pause**: until the next event of a stream, the first one included; of an answer in one piece, its duration.
  **full service**: from the fault until requests that start from then on are served within twice their undisturbed
  time and 1 s.
- **left**, after everything has ended: reservations, streams of gateways, requests at workers, open files of the
  process that opened most, and Redis keys that were not there before. **memory**: growth of the process that grew most.
- A cell is *red* when a request failed or differs, and a row also when something is left, and no sentence says why that
  cannot be otherwise.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What a page is about."""

    command: str
    commit: str
    machine: str
    rows: Sequence[Row]
    broken: Sequence[Break] = ()


def as_json(run: Run) -> str:
    """Returns all figures."""
    found: dict[str, Any] = dataclasses.asdict(run)
    for shown, row in zip(found["rows"], run.rows, strict=True):
        shown["red"] = row.red
        for cell, one in zip(shown["cells"], row.cells, strict=True):
            cell["perfect"] = one.perfect
            cell["errors"] = cell["errors"][:10]
    return json.dumps(found, ensure_ascii=False) + "\n"


def rows_of(text: str) -> list[Row]:
    """Returns the rows of the JSON of a run."""
    rows = []
    for found in json.loads(text)["rows"]:
        del found["red"]
        cells = [Cell(**{name: value for name, value in cell.items() if name != "perfect"}) for cell in found["cells"]]
        rows.append(Row(**found | {"cells": cells, "left": Left(**found["left"])}))
    return rows


def as_page(run: Run) -> str:
    """Returns the page."""
    numbers = _numbered(run.rows)
    ran = [row for row in run.rows if not row.not_run]
    parts = [
        "# Fault matrix of suites that are deliberately wrong" if run.broken else "# Fault matrix",
        INTRODUCTION,
        f"Machine: {run.machine}. Commit: {run.commit}. Command: `{run.command}`.",
        "## Rows",
        _table((*_suite(run, "suite"), *HEAD), [(*_suite(run, row.broken), *row_of(row, numbers)) for row in ran]),
        "## Cells",
        _table(
            (*_suite(run, "suite"), "part", "fault", *_loads(ran)),
            [(*_suite(run, row.broken), *_marks(row, _loads(ran), numbers)) for row in ran],
        ),
        "`ok`: nothing but a pause. A number: the sentence below. `-`: the topology has no such requests.",
    ]
    if run.broken:
        parts += ["## Suites", "\n".join(f"- `{wrong.name}`: {wrong.about}." for wrong in run.broken)]
    if numbers:
        parts += ["## Sentences", "\n".join(f"{number}. {text}" for text, number in numbers.items())]
    if problems := [problem for row in ran for problem in problems_of(row)]:
        parts += ["## Red", "\n".join(f"- {problem}" for problem in problems)]
    if missing := [row for row in run.rows if row.not_run]:
        parts += [
            "## Not run",
            _table(("part", "fault", "why"), [(row.part, row.fault, row.not_run) for row in missing]),
        ]
    used = sorted({row.fault for row in run.rows}, key=list(FAULTS).index)
    parts += ["## Faults", "\n".join(f"- `{name}`: {FAULTS[name].about}." for name in used)]
    parts += ["## Loads", "\n".join(f"- `{name}`: {LOADS[name].about}." for name in _loads(ran))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _suite(run: Run, name: str) -> tuple[str, ...]:
    """Returns the first column, which only a page of wrong suites has."""
    return (name,) if run.broken else ()


def row_of(row: Row, numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Returns a row of the table: the sums of its cells, and the worst of their times."""

    def total(name: str) -> str:
        return str(sum(getattr(cell, name) for cell in row.cells))

    services = [cell.full_service_s for cell in row.cells]
    reached = [found for found in services if found is not None]
    full = f"{max(reached, default=0):.1f}" if len(reached) == len(services) else "not reached"
    pause = max((cell.pause_s for cell in row.cells), default=0.0)
    counts = tuple(map(total, ("requests", "failed", "different", "lost", "doubled", "retried")))
    return (
        *(row.part, row.fault, *counts, str(row.moved), f"{pause:.1f}", full),
        *(_left(row.left), f"{row.left.memory_mib:.0f}", verdict(row, numbers)),
    )


def verdict(row: Row, numbers: Mapping[str, int]) -> str:
    """Returns ok, red, or the numbers of the sentences."""
    if row.not_run:
        return "not run"
    if row.red:
        return "**red**"
    found = sorted({numbers[text] for text in texts_of(row)})
    return ", ".join(map(str, found)) or "ok"


def texts_of(row: Row) -> list[str]:
    """Returns the sentences of a row."""
    return [text for text in (*(cell.sentence for cell in row.cells), row.sentence) if text]


def _numbered(rows: Sequence[Row]) -> dict[str, int]:
    texts = dict.fromkeys(text for row in rows for text in texts_of(row))
    return {text: number for number, text in enumerate(texts, 1)}


def _left(left: Left) -> str:
    counts = (("reservations", left.reservations), ("streams", left.streams), ("requests", left.running))
    words = [f"{count} {name}" for name, count in counts if count]
    words += [f"{left.files} files"] if left.files else []
    words += [f"{count} of `{kind}`" for kind, count in (left.keys or {}).items()]
    return ", ".join([*words, *([left.errors] if left.errors else [])]) or "0"


def _loads(rows: Sequence[Row]) -> list[str]:
    run = {cell.load for row in rows for cell in row.cells}
    return [name for name in LOADS if name in run]


def mark(cell: Cell, numbers: Mapping[str, int]) -> str:
    """Returns a cell in a word."""
    if cell.not_run:
        return "not run"
    if cell.sentence:
        return str(numbers[cell.sentence])
    return "ok" if cell.perfect else "**red**"


def _marks(row: Row, loads: Sequence[str], numbers: Mapping[str, int]) -> tuple[str, ...]:
    by_load = {cell.load: mark(cell, numbers) for cell in row.cells}
    return (row.part, row.fault, *(by_load.get(load, "-") for load in loads))


def problems_of(row: Row) -> list[str]:
    """Returns what makes a row red."""
    place = ", ".join(filter(None, (row.broken, row.part, row.fault)))
    found = [f"{place}: {row.problem}"] if row.problem else []
    if not row.not_run and not row.left.nothing and not row.sentence:
        found.append(f"{place}: left: {_left(row.left)}")
    cells = (cell for cell in row.cells if not cell.perfect and not cell.sentence)
    return [*found, *(f"{place}, {cell.load}: {problem_of(cell)}" for cell in cells)]


def problem_of(cell: Cell) -> str:
    """Returns what is wrong with a red cell."""
    if not cell.requests:
        return "no request ended"
    counts = (
        (cell.failed, "failed"),
        (cell.different, "different"),
        (cell.lost, "tokens lost"),
        (cell.doubled, "doubled"),
    )
    words = [f"{count} {name}" for count, name in counts if count]
    words += ["full service not reached"] if cell.full_service_s is None else []
    first = f"; first: {cell.errors[0][:300]}" if cell.errors else ""
    return f"{', '.join(words)} of {cell.requests}{first}".replace("\n", " ").replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
