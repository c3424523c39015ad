"""Runs rows of the fault matrix, one suite for many of them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.breaks import NOTHING, Break
from tests.support.faults.clocks import Clocks
from tests.support.faults.fault import Scene
from tests.support.faults.injections import CLOCK, NAMESPACE
from tests.support.faults.network import Network, enter_private_network, run
from tests.support.faults.parts import TOPOLOGIES, Topology, victims
from tests.support.faults.place import Place
from tests.support.faults.row import References, Row, run_row
from tests.support.faults.selection import Planned
from tests.support.faults.sentences import excuse, excuse_left

REDIS_DISK_MIB = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How rows run.

    Attributes:
        seconds: for which loads go on after a fault.
        logs: folder for the logs of all processes; None: they are deleted.
        other: another source tree.
    """

    seconds: float = 6.0
    broken: Break = NOTHING
    logs: Path | None = None
    other: Path | None = None


def run_rows(rows: Sequence[Planned], options: Options, tell: Callable[[Row], None]) -> None:
    """Runs rows; `tell` is called with each as soon as it has ended."""

    def ended(row: Row) -> None:
        row.broken = options.broken.name
        tell(row)

    for row in rows:
        if row.not_run:
            ended(row.skipped)
    able = [row for row in rows if not row.not_run]
    for (name, _), group in itertools.groupby(able, key=lambda row: row.suite):
        waiting = list(group)
        while waiting:
            waiting = _run_in_one_suite(TOPOLOGIES[name], waiting, options, ended)


def _run_in_one_suite(
    topology: Topology, rows: Sequence[Planned], options: Options, tell: Callable[[Row], None]
) -> list[Planned]:
    """Runs rows until the suite is not whole and empty after one; returns the others."""
    needs = {need for row in rows for need in (*row.part.needs, *row.fault.needs)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fault-matrix-")))
        if needs & {NAMESPACE, "mount"}:
            enter_private_network()
        network = stack.enter_context(Network(victims(topology))) if NAMESPACE in needs else None
        clocks = Clocks(folder / "clocks") if CLOCK in needs else None
        place = Place(topology, folder, network, options.broken, clocks)
        stack.callback(_keep_logs, place.logs, options.logs)
        stack.callback(place.close)
        if "mount" in needs:
            run("mount", "-t", "tmpfs", "-o", f"size={REDIS_DISK_MIB}m", "tmpfs", str(place.redis_home))
            stack.callback(subprocess.run, ["umount", "--lazy", str(place.redis_home)], check=False)
        try:
            place.start()
            return asyncio.run(_run(place, rows, options, tell))
        except AssertionError as error:
            tell(Row(rows[0].part.name, rows[0].fault.name, problem=f"the suite did not start: {error}"))
            return list(rows[1:])


async def _run(place: Place, rows: Sequence[Planned], options: Options, tell: Callable[[Row], None]) -> list[Planned]:
    references = References()
    try:
        for number, planned in enumerate(rows, 1):
            scene = Scene(place, planned.part, options.other)
            try:
                row = await run_row(scene, planned.fault, planned.loads, references, options.seconds)
            except Exception as error:  # the others may still run
                row = Row(planned.part.name, planned.fault.name, problem=f"{type(error).__name__}: {error}")
            for cell in row.cells:
                cell.sentence = excuse(cell)
            row.sentence = excuse_left(row.part, row.fault, row.left)
            tell(row)
            if row.problem or not row.left.nothing:
                return list(rows[number:])
    finally:
        await place.close_clients()
    return []


def _keep_logs(logs: Path, kept: Path | None) -> None:
    if kept is None:
        return
    for log in logs.iterdir():
        with log.open("rb") as source, (kept / log.name).open("ab") as target:
            shutil.copyfileobj(source, target)
