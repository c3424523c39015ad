"""What clients notice of every fault of every part under every load: `python benchmarks/fault_matrix.py`.

Starts a suite (two of every tier, on one Redis), asks each request once undisturbed, repeats them all the time, lets a
fault happen to a part, and compares. `--part`, `--fault` and `--load` choose cells and may be repeated; `--write`
writes docs/fault-matrix.md and the JSON beside it. Faults of the network, memory, disks and certificates need root,
and those of clocks a C compiler; a cell that cannot run here is "not run", with the reason. `--break all` runs suites
that are deliberately wrong, whose cells have to be red. `--jobs` runs several suites at once, which share the
machine: pauses are longer then. The exit code is 1 when a cell is red, and 2 when an option is
wrong.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from tests.support.faults.breaks import Break
from tests.support.faults.host import Host, described
from tests.support.faults.lanes import run_shares, shares_of
from tests.support.faults.matrix import Options, run_rows
from tests.support.faults.page import Run, as_json, as_page, problems_of, row_of, texts_of
from tests.support.faults.row import Row
from tests.support.faults.selection import Planned, UnknownNameError, broken, missing, planned

ROOT = Path(__file__).parents[1]
PAGE, RED_PAGE = ROOT / "docs" / "fault-matrix.md", ROOT / "docs" / "fault-matrix-red.md"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass
class Told:
    """The rows that have ended; each is printed at once."""

    rows: list[Row] = field(default_factory=list)

    def __call__(self, row: Row) -> None:
        """Takes a row, and prints it and what is wrong with it."""
        self.rows.append(row)
        if row.not_run:
            return
        texts = dict.fromkeys(texts_of(row))
        words = row_of(row, {text: number for number, text in enumerate(texts, 1)})
        print(f"| {' | '.join(words)} |", flush=True)
        for problem in problems_of(row):
            print(f"red: {problem}", file=sys.stderr, flush=True)


def _commit() -> str:
    """Returns the commit of this tree, and whether files differ from it."""
    ended = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return ended.stdout.strip() or "unknown"


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@app.command()
def main(
    part: Annotated[list[str] | None, typer.Option(help="part of the suite; may be repeated; default: all")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="what happens to it; may be repeated; default: all")] = None,
    load: Annotated[list[str] | None, typer.Option(help="kind of requests; may be repeated; default: all")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="for which requests go on after a fault")] = 6.0,
    json: Annotated[Path | None, typer.Option(help="file for all figures")] = None,
    write: Annotated[bool, typer.Option("--write", help="write the page and the JSON beside it")] = False,
    page: Annotated[Path | None, typer.Option(help="page that --write writes")] = None,
    other: Annotated[Path | None, typer.Option(help="another version of this tree, for rolling upgrades")] = None,
    logs: Annotated[Path | None, typer.Option(help="folder for the logs of all processes")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="suites that run at once")] = 1,
    breaks: Annotated[
        list[str] | None, typer.Option("--break", help="run a suite that is deliberately wrong; all: each of them")
    ] = None,
) -> None:
    """Run cells of the fault matrix."""
    try:
        wrongs = broken(breaks or ())
        rows = [planned(*_rows_of(wrong, part, fault), load or (), Host(), other) for wrong in wrongs]
    except UnknownNameError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    for folder, flag in ((other, "--other"), (logs, "--logs")):
        if folder is not None and not folder.is_dir():
            print(f"{flag}: {folder} is not a folder.", file=sys.stderr)
            raise typer.Exit(2)
    for sentence in missing([row for several in rows for row in several]):
        print(sentence, file=sys.stderr)
    signal.signal(signal.SIGTERM, _interrupted)  # what was made is removed then, too
    told = Told()
    try:
        if jobs > 1:
            shared = {"--load": load or (), "--seconds": [seconds], "--other": [other], "--logs": [logs]}
            options = [str(word) for flag, values in shared.items() for one in values if one for word in (flag, one)]
            _run_at_once(list(zip(wrongs, rows, strict=True)), options, jobs, told)
        else:
            for wrong, several in zip(wrongs, rows, strict=True):
                run_rows(several, Options(seconds, wrong, logs, other), told)
    finally:
        command = f"python benchmarks/fault_matrix.py {shlex.join(sys.argv[1:])}".strip()
        run = Run(command, _commit(), described(), told.rows, [wrong for wrong in wrongs if wrong.name])
        if json is not None:
            json.write_text(as_json(run))
        if write:
            page = page or (RED_PAGE if breaks else PAGE)
            page.write_text(as_page(run))
            page.with_suffix(".json").write_text(as_json(run))
    raise typer.Exit(1 if any(row.red for row in told.rows) else 0)


def _run_at_once(plans: Sequence[tuple[Break, Sequence[Planned]]], options: list[str], jobs: int, told: Told) -> None:
    """Runs the rows of several suites at once, with options that all have; then they are in their order again."""
    order = [(wrong.name, row.part.name, row.fault.name) for wrong, rows in plans for row in rows]
    told.rows = [row.skipped for _, rows in plans for row in rows if row.not_run]
    shares = [share for wrong, rows in plans for share in shares_of(wrong.name, rows)]
    try:
        asyncio.run(run_shares([sys.executable, __file__, *options], shares, jobs, told.rows.extend))
    finally:
        told.rows.sort(key=lambda row: order.index((row.broken, row.part, row.fault)))


def _rows_of(wrong: Break, part: list[str] | None, fault: list[str] | None) -> tuple[list[str], list[str]]:
    """Returns the parts and faults to run: of a wrong suite, unless told otherwise, those that it turns red."""
    if wrong.name and not part and not fault:
        return [wrong.red[0]], [wrong.red[1]]
    return part or [], fault or []


if __name__ == "__main__":
    app()
