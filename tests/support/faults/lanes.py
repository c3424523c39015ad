"""Runs the rows of several suites at a time, each suite in a process of its own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.page import rows_of
from tests.support.faults.row import Row
from tests.support.faults.selection import Planned

END_S = 60.0


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of one part that run in one suite.

    Attributes:
        broken: name of the suite, if it is deliberately wrong.
    """

    broken: str
    part: str
    faults: tuple[str, ...]

    @property
    def options(self) -> list[str]:
        """What chooses them on the command line."""
        faults = [word for fault in self.faults for word in ("--fault", fault)]
        return ["--part", self.part, *faults, *(("--break", self.broken) if self.broken else ())]


def shares_of(broken: str, rows: Iterable[Planned]) -> list[Share]:
    """Returns the shares of rows that can run."""
    faults: dict[tuple[object, str], list[str]] = {}
    for row in rows:
        if not row.not_run:
            faults.setdefault((row.suite, row.part.name), []).append(row.fault.name)
    return [Share(broken, part, tuple(names)) for (_, part), names in faults.items()]


async def run_shares(
    command: Sequence[str], shares: Sequence[Share], lanes: int, ended: Callable[[list[Row]], None]
) -> None:
    """Runs shares, the longest ones first; `ended` is called with the rows of each.

    Args:
        command: of the matrix, which prints rows and writes them to the file of `--json`.
        lanes: how many run at once.
    """
    waiting = sorted(shares, key=lambda share: len(share.faults))

    async def run_lane() -> None:
        while waiting:
            ended(await _run(command, waiting.pop()))

    async with asyncio.TaskGroup() as group:
        for _ in range(lanes):
            group.create_task(run_lane())


async def _run(command: Sequence[str], share: Share) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as folder:
        file = Path(folder) / "rows.json"
        process = await asyncio.create_subprocess_exec(*command, *share.options, "--json", str(file))
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            async with asyncio.timeout(END_S):
                await process.wait()
            raise
        rows = rows_of(file.read_text()) if file.exists() else []
    missing = set(share.faults) - {row.fault for row in rows}
    problem = f"the process that ran it ended with {status}"
    return [*rows, *(Row(share.part, fault, problem=problem, broken=share.broken) for fault in sorted(missing))]
