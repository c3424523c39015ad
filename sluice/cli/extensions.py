"""`sluice extensions`: what installed packages add to the suite, and whether it can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table

from services.common.errors import SluiceError
from services.common.packages.extensions import ENGINES, GROUPS, Extension, conflict_of, installed
from services.router.scheduling.policies.stages import BUILT_IN_STAGES, KINDS, find_stage
from services.worker.engines import BUILT_IN, find_engine

IMPORT_TIMEOUT_S = 60.0
"""Seconds for importing one extension in a process of its own; one that takes longer cannot be used."""


@dataclass(frozen=True)
class Row:
    """An extension, and why it cannot be used; empty if it can."""

    extension: Extension
    reason: str


def run(as_json: bool, console: Console) -> int:
    """Prints every extension; returns exit code 1 if one cannot be used.

    Each is imported in a process of its own: the code of packages cannot end or change the command.
    """
    rows = all_rows()
    if as_json:
        print(json.dumps([{**asdict(row.extension), "usable": not row.reason, "reason": row.reason} for row in rows]))
    elif not rows:
        console.print("No extension is installed.")
    else:
        table = Table("group", "name", "package", "state", box=None, pad_edge=False)
        for row in rows:
            owner = f"{row.extension.distribution} {row.extension.version}".rstrip()
            table.add_row(row.extension.group, row.extension.name, owner, row.reason or "usable")
        console.print(table, markup=False)
    return int(any(row.reason for row in rows))


def all_rows() -> list[Row]:
    """Returns every extension that is installed, with what is wrong with it."""
    return [row for group in GROUPS for row in rows_of(group)]


def rows_of(group: str) -> list[Row]:
    """Returns the extensions of a group with what is wrong with each."""
    rows: list[Row] = []
    for _, same in groupby(installed(group), key=lambda extension: extension.name):
        extensions = list(same)
        for extension in extensions:
            conflict = conflict_of(extension, extensions, built_in_names(group))
            rows.append(Row(extension, conflict or _imported(extension)))
    return rows


def built_in_names(group: str) -> set[str]:
    """Returns the names of a group that the suite itself has."""
    return set(BUILT_IN) if group == ENGINES else {name for names in BUILT_IN_STAGES.values() for name in names}


def _imported(extension: Extension) -> str:
    # -P: a folder of the working directory is not an installed package.
    command = [sys.executable, "-P", "-m", "sluice.cli.extensions", extension.group, extension.name]
    try:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"importing it takes longer than {IMPORT_TIMEOUT_S:.0f} s"
    else:
        if process.returncode == 0:
            return process.stdout
        reason = "importing it ended the process"
    return f"Extension {extension.name} of {extension.distribution} cannot be loaded: {reason}."


def check(group: str, name: str) -> str:
    """Imports an extension into this process; returns why it cannot be used, empty if it can."""
    try:
        if group == ENGINES:
            find_engine(name)
        else:
            find_stage(name, *KINDS)
    except SluiceError as error:
        return error.message
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # what the extension prints is not the result
        output.write(check(*sys.argv[1:]))
