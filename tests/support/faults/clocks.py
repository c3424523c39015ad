"""Clocks of their own for single processes, moved while these run: a library that is loaded into each of them.

Only the time of day is moved. What a process measures with a monotonic clock stays right, as when an operator or an NTP
client sets the clock of a machine. libfaketime does not do: a redis-server with jemalloc does not start with it.
"""

from __future__ import annotations

import struct
from pathlib import Path

from tests.support.faults.network import run

SOURCE = Path(__file__).with_name("clock.c")
_SECONDS = struct.Struct("=q")


class Clocks:
    """The clocks, by name of the process.

    Args:
        folder: gets the library, and a file for each clock, which its process has in memory.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._library = folder / "clock.so"
        run("cc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE))

    def prefix(self, name: str) -> tuple[str, ...]:
        """Returns what runs a command with a clock of its own; it is right until it is moved."""
        self._file(name).write_bytes(_SECONDS.pack(0))
        return ("env", f"LD_PRELOAD={self._library}", f"FAULT_CLOCK_FILE={self._file(name)}")

    def move(self, name: str, seconds: int) -> None:
        """Lets a clock differ from the machine's by so many seconds, at once."""
        with self._file(name).open("r+b", buffering=0) as file:  # the same file: the process has it in memory
            file.write(_SECONDS.pack(seconds))

    def has_own(self, pid: int) -> bool:
        """Whether a process has loaded the library; without it, moving its clock changes nothing."""
        return str(self._library) in Path(f"/proc/{pid}/maps").read_text()

    def _file(self, name: str) -> Path:
        return self._folder / name
