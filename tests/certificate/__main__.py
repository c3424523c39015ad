"""Compares Sluice with the engines' own code: `make certificate`; see docs/certificate.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.certificate import plan, report
from tests.certificate.comparison import Comparison
from tests.certificate.explaining import explain
from tests.certificate.reasons import REASONS
from tests.certificate.running import Run
from tests.certificate.sides.child import ChildSide, python_of
from tests.certificate.sides.side import Side
from tests.certificate.sides.sluice import SluiceSide
from tests.certificate.tally import FINE, Tally
from tests.certificate.templates import build, mistral, texts_of

ENGINES = ("vllm", "sglang", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 when a difference has no reason, a reason no difference, or text is lost."""
    parser = argparse.ArgumentParser(description="Compares prompts and answers with those of the engines' own code.")
    parser.add_argument("--conversations", type=int, default=100_000, help="how many, shared out among all cells")
    parser.add_argument("--templates", type=Path, help="folder of further chat templates, NAME.jinja")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which, of those that scripts/engines.sh made")
    parser.add_argument("--only", default="", help="cells whose TEMPLATE|API|FEATURE has this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--examples", type=int, default=1, help="how many to print of each kind of unexplained difference"
    )
    parser.add_argument("--report", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    logs = Path("build/certificate")
    logs.mkdir(parents=True, exist_ok=True)
    missing = [name for name in options.engines.split(",") if not python_of(name).exists()]
    if missing:
        parser.error(f"{', '.join(missing)}: scripts/engines.sh installs them")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        folders = {**build(Path(folder), texts_of(options.templates)), **mistral()}
        sides: list[Side] = [ChildSide(name, logs / f"{name}.log") for name in options.engines.split(",")]
        try:
            formats = plan.formats()
            run = Run(SluiceSide(), sides, folders, formats)
            cells = [*plan.prompt_cells(list(folders)), *plan.answer_cells(formats)]
            chosen = [cell for cell in cells if options.only in f"{cell.subject}|{cell.api}|{cell.feature}"]
            tally = Tally()
            compared(run, chosen, -(-options.conversations // len(chosen)), options.seed, tally)
        finally:
            for side in sides:
                side.close()
    facts = report.Facts(run.count, time.monotonic() - started, tuple(side.version for side in sides), len(folders))
    stale = stale_reasons(tally, options.engines.split(",")) if not options.only and options.templates else []
    print(report.summary(tally, facts, stale, options.examples), flush=True)
    if options.report:
        options.report.write_text(report.document(tally, facts), "utf-8")
    return int(bool(tally.unexplained_count or tally.lost or stale))


def compared(run: Run, cells: Sequence[plan.Cell], count: int, seed: int, tally: Tally) -> None:
    """Runs the cells, with a line of progress for each subject."""

    def explained(comparison: Comparison) -> None:
        tally.add(comparison, () if comparison.verdict in FINE else explain(comparison, REASONS, run.changed))

    subject, started = "", time.monotonic()
    for cell in cells:
        if cell.subject != subject:
            subject = cell.subject
            seconds = time.monotonic() - started
            print(
                f"{seconds:6.0f} s  {run.count:>7,}  {tally.unexplained_count:>5} unexplained  {subject}",
                file=sys.stderr,
            )
        for comparison in run.cell(cell, count, seed):
            explained(comparison)


def stale_reasons(tally: Tally, engines: Sequence[str]) -> list[str]:
    """Returns the reasons that explain nothing."""
    return [reason.name for reason in REASONS if reason.engine in engines and not tally.reasons[reason.name]]


if __name__ == "__main__":
    raise SystemExit(main())
