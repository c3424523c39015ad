"""`sluice extensions`: what the suite's own folders and installed packages add to it, and whether it can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table

from services.common.base.errors import SluiceError
from services.common.packages.extensions import (
    ENGINES,
    GROUPS,
    POLICIES,
    Extension,
    conflict_of,
    find_extension,
    installed,
)
from services.router.scheduling.policies.stages import BUILT_IN_STAGES, KINDS, find_stage
from services.worker.engines import BUILT_IN, find_engine

IMPORT_TIMEOUT_S = 60.0
"""Seconds for importing one extension in a process of its own; one that takes longer cannot be used."""


PROCESSES = 4
"""Processes that import extensions at the same time."""


@dataclass(frozen=True)
class Row:
    """An extension, and why it cannot be used; empty if it can.

    Attributes:
        optional: whether only packages of its extra are missing, which are installed where they are wanted.
    """

    extension: Extension
    reason: str
    optional: bool = False


def run(as_json: bool, console: Console) -> int:
    """Prints every extension; returns exit code 1 if one is broken.

    They are imported in other processes: the code of packages cannot end or change the command.
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
    return int(any(row.reason and not row.optional for row in rows))


def all_rows() -> list[Row]:
    """Returns the extensions of all groups with what is wrong with each."""
    found = [
        (extension, extensions)
        for group in GROUPS
        for _, same in groupby(installed(group), key=lambda extension: extension.name)
        for extensions in [list(same)]
        for extension in extensions
    ]
    rows = {extension: row for extension, same in found if (row := _row_without_import(extension, same)) is not None}
    rest = [extension for extension, _ in found if extension not in rows]
    # The suite's own share a process, the others have one each.
    shares = [[extension] for extension in rest if not extension.is_own]
    if own := [extension for extension in rest if extension.is_own]:
        shares.append(own)
    with ThreadPoolExecutor(PROCESSES) as threads:
        for share, reasons in zip(shares, threads.map(_imported, shares), strict=True):
            rows |= {extension: Row(extension, reason) for extension, reason in zip(share, reasons, strict=True)}
    return [rows[extension] for extension, _ in found]


def _row_without_import(extension: Extension, same: Sequence[Extension]) -> Row | None:
    """Returns the row of an extension that need not be imported; None for others."""
    if conflict := conflict_of(extension, same, built_in_names(extension.group)):
        return Row(extension, conflict)
    if missing := extension.missing_packages():
        names = " and ".join(missing)
        return Row(extension, f"{names} not installed; run: {extension.install_command}", optional=True)
    return None


def built_in_names(group: str) -> set[str]:
    """Returns the names of a group that the suite itself has."""
    if group == ENGINES:
        return set(BUILT_IN)
    return {name for names in BUILT_IN_STAGES.values() for name in names} if group == POLICIES else set()


def _imported(extensions: Sequence[Extension]) -> list[str]:
    """Imports extensions in one process; returns why each cannot be used, empty if it can."""
    # -P: a folder of the working directory is not an installed package.
    names = [text for extension in extensions for text in (extension.group, extension.name)]
    command = [sys.executable, "-P", "-m", "sluice.cli.extensions", *names]
    limit_s = IMPORT_TIMEOUT_S * len(extensions)
    try:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"importing it takes longer than {limit_s:.0f} s"
    else:
        if process.returncode == 0:
            reasons: list[str] = json.loads(process.stdout)
            return reasons
        reason = "importing it ended the process"
    return [
        f"Extension {extension.name} of {extension.distribution} cannot be loaded: {reason}."
        for extension in extensions
    ]


def check(group: str, name: str) -> str:
    """Imports an extension into this process; returns why it cannot be used, empty if it can."""
    try:
        if group == ENGINES:
            find_engine(name)
        elif group == POLICIES:
            find_stage(name, *KINDS)
        elif extension := find_extension(group, name):
            extension.load()
    except SluiceError as error:
        return error.message
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # what the extension prints is not the result
        output.write(json.dumps([check(*pair) for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]))
