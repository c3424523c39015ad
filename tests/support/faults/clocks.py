"""Clocks of their own for single processes, moved while these run: libfaketime, which is loaded into each of them.

Only the time of day is moved. What a process measures with a monotonic clock stays right, as when an operator or an NTP
client sets the clock of a machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.faults.host import clock_library

LOOKED_AT_S = 1
"""A process looks at its file when it asks for the time, at most so often."""


class Clocks:
    """The clocks, by name of the process.

    Args:
        folder: which has a file for each clock; processes read it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder

    def prefix(self, name: str) -> tuple[str, ...]:
        """Returns what runs a command with a clock of its own; it is right until it is moved."""
        self.move(name, 0)
        variables = {
            "LD_PRELOAD": clock_library(),
            "FAKETIME_TIMESTAMP_FILE": self._file(name),
            "FAKETIME_CACHE_DURATION": LOOKED_AT_S,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
            "NO_FAKE_STAT": 1,  # times of files are the machine's
        }
        return ("env", *(f"{variable}={value}" for variable, value in variables.items()))

    def move(self, name: str, seconds: int) -> None:
        """Lets a clock differ from the machine's by so many seconds; its process notices within a second."""
        fresh = self._file(name).with_suffix(".fresh")
        fresh.write_text(f"{seconds:+d}\n")
        os.replace(fresh, self._file(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.clock"


def has_own_clock(pid: int) -> bool:
    """Whether a process has loaded the library; without it, moving its clock changes nothing."""
    library = clock_library()
    return library is not None and library.name in Path(f"/proc/{pid}/maps").read_text()
