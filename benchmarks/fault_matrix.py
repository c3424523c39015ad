"""What clients notice of every fault of every part under every load: `python benchmarks/fault_matrix.py`.

Starts a suite (two of every tier, on one Redis), asks each request once undisturbed, repeats them all the time, lets a
fault happen to a part, and compares. `--part`, `--fault` and `--load` choose cells and may be repeated; `--write`
writes docs/fault-matrix.md and the JSON beside it. Faults of the network, memory and disks need root; a cell that
cannot run here is "not run", with the reason. The exit code is 1 when a cell is red, and 2 when an option is wrong.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from tests.support.faults.host import Host, described
from tests.support.faults.matrix import Options, run_rows
from tests.support.faults.page import Run, as_json, as_page, problems_of, row_of
from tests.support.faults.row import Row
from tests.support.faults.selection import UnknownNameError, broken, missing, planned

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "fault-matrix.md"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _told(row: Row) -> None:
    """Prints a row, and what is wrong with it."""
    if row.not_run:
        return
    texts = dict.fromkeys([*(cell.sentence for cell in row.cells), row.sentence])
    print("| " + " | ".join(row_of(row, {text: number for number, text in enumerate(texts, 1)})) + " |", flush=True)
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
    page: Annotated[Path, typer.Option(help="page that --write writes")] = PAGE,
    other: Annotated[Path | None, typer.Option(help="another version of this tree, for rolling upgrades")] = None,
    logs: Annotated[Path | None, typer.Option(help="folder for the logs of all processes")] = None,
    breaks: Annotated[str, typer.Option("--break", help="run a suite that is deliberately wrong")] = "",
) -> None:
    """Run cells of the fault matrix."""
    try:
        rows = planned(part or (), fault or (), load or (), Host(), other)
        wrong = broken(breaks)
    except UnknownNameError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    for folder, flag in ((other, "--other"), (logs, "--logs")):
        if folder is not None and not folder.is_dir():
            print(f"{flag}: there is no folder {folder}.", file=sys.stderr)
            raise typer.Exit(2)
    for sentence in missing(rows):
        print(sentence, file=sys.stderr)
    signal.signal(signal.SIGTERM, _interrupted)  # what was made is removed then, too
    done = run_rows(rows, Options(seconds, wrong, logs, other), _told)
    command = f"python benchmarks/fault_matrix.py {shlex.join(sys.argv[1:])}".strip()
    run = Run(command, _commit(), described(), done, wrong.about if wrong.name else "")
    if json is not None:
        json.write_text(as_json(run))
    if write:
        page.write_text(as_page(run))
        page.with_suffix(".json").write_text(as_json(run))
    raise typer.Exit(1 if any(row.red for row in done) else 0)


if __name__ == "__main__":
    app()
