"""`sluice engines`: the engines by name, and what each honours."""

from __future__ import annotations

from pathlib import Path

from services.worker.engines import engine_names
from services.worker.engines.table import built_in_engines, table, write


def run(as_table: bool, file: Path | None) -> int:
    """Prints names, or the table of what engines honour; with a file, writes the table into it."""
    if file is not None:
        print(f"{file} {'has changed' if write(file) else 'is as it should be'}")
    elif as_table:
        print(table(built_in_engines()), end="")
    else:
        print("\n".join(engine_names()))
    return 0
