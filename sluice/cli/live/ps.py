"""`sluice ps`: lists the suites that run on this machine, and their processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.cli.errors import BadFlag
from sluice.cli.suites import running_suites

SOME, NONE = 0, 1


def run(as_json: bool, console: Console) -> int:
    """Prints every suite of this user; returns exit code 0 if one runs, else 1."""
    suites = running_suites()
    if as_json:
        print(json.dumps([asdict(suite) for suite in suites]))
    elif not suites:
        console.print("No suite runs on this machine under this user; start one with `sluice up`.")
    for suite in () if as_json else suites:
        model = f"  model {suite.model}" if suite.model else ""
        console.print(escape(f"{suite.url}  sluice up: {suite.pid}{model}"), style="bold", soft_wrap=True)
        table = Table("process", "pid", "address", "", box=None, header_style="dim")
        for process in suite.processes:
            state = "" if _runs(process["pid"]) else "[yellow]not running[/]"
            table.add_row(escape(process["name"]), str(process["pid"]), escape(process["address"]), state)
        console.print(table)
    return SOME if suites else NONE


def pid_of(name: str) -> int:
    """Returns the id of a process of the only suite.

    Raises:
        BadFlag: no suite runs or several do, or none of its processes has this name.
    """
    suites = running_suites()
    if len(suites) != 1:
        number = "several suites run" if suites else "no suite runs"
        raise BadFlag(f"--pid {name}: {number} on this machine; see `sluice ps`")
    pids: dict[str, int] = {process["name"]: process["pid"] for process in suites[0].processes}
    if name not in pids:
        raise BadFlag(f"--pid {name} is no process of the suite; it has {', '.join(pids)}")
    return pids[name]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
