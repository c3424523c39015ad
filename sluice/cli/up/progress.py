"""The output of `sluice up`: log lines with a coloured prefix, and the processes that are not ready yet.

A separate thread writes it: a paused or slow terminal must stop neither the services nor Ctrl-C.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sluice.cli.up.plan import Process

_COLOURS = {"gateway": "green", "preprocess": "cyan", "router": "yellow", "postprocess": "magenta", "worker": "blue"}
_MAX_QUEUED_LINES = 10_000
"""Lines that wait to be printed by `sluice up`; further ones are dropped, and their number is printed."""
_CHANGE_S, _REPEAT_S = 10.0, 30.0
"""Seconds after which another reason for waiting, and the same one again, get a line where no table is shown."""
_CLOSE_TIMEOUT_S = 1.0


class View:
    """Writes log lines and progress to a console.

    Args:
        processes: the processes of the suite.
        console: where to write; on a terminal, a table of processes that are not ready stays below the lines.
    """

    def __init__(self, processes: Iterable[Process], console: Console) -> None:
        self._console = console
        self._processes = {process.name: process for process in processes}
        self._width = max(map(len, self._processes), default=0)
        self._began = time.monotonic()
        self._waiting = dict.fromkeys(self._processes, "")
        self._reported: dict[str, tuple[str, float]] = {}
        self._lines: queue.Queue[Text | None] = queue.Queue(_MAX_QUEUED_LINES)
        self._dropped = 0
        self._live = Live(console=console, get_renderable=self._table, transient=True, refresh_per_second=8)
        self._writer = threading.Thread(target=self._write, name="screen", daemon=True)

    def open(self) -> None:
        """Starts writing."""
        if self._console.is_terminal:
            self._live.start()
        self._writer.start()

    def add(self, process: Process) -> None:
        """Adds a process that starts later; its readiness is not shown."""
        self._processes[process.name] = process
        self._width = max(self._width, len(process.name))

    def close(self) -> None:
        """Writes the remaining lines, unless the terminal blocks."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._writer.join(_CLOSE_TIMEOUT_S)

    def log(self, name: str, line: str) -> None:
        """Writes a log line of a process."""
        colour = _COLOURS.get(self._processes[name].kind, "white")
        self._show(Text.assemble((f"{name:<{self._width}} | ", colour), line))

    def report(self, text: str, style: str = "bold") -> None:
        """Writes a message of `sluice up` itself."""
        self._show(Text.assemble((f"{'sluice':<{self._width}} | ", style), text))

    def wait(self, name: str, reason: str) -> None:
        """Shows why a process is not ready."""
        self._waiting[name] = reason
        now = time.monotonic()
        previous, at = self._reported.get(name, ("", self._began))
        pause = _CHANGE_S if reason != previous else _REPEAT_S
        if reason and now - at >= pause:
            self._reported[name] = (reason, now)
            if not self._console.is_terminal:
                self.report(f"waiting for {name}: {reason}")

    def ready(self, name: str) -> None:
        """Reports that a process is ready."""
        self._waiting.pop(name, None)
        address = self._processes[name].address
        self.report(f"{name} is ready at {address} after {time.monotonic() - self._began:.1f} s")
        if not self._waiting:
            self.settle()

    def settle(self) -> None:
        """Removes the table of processes that are not ready."""
        self._waiting.clear()
        if self._live.is_started:
            self._live.stop()

    def _show(self, text: Text) -> None:
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        try:
            while (text := self._lines.get()) is not None:
                self._console.print(text, soft_wrap=True)
                if self._dropped and self._lines.empty():
                    dropped, self._dropped = self._dropped, 0
                    self._console.print(f"… {dropped} lines dropped", soft_wrap=True)
        except OSError:
            return  # the terminal was closed

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, reason in self._waiting.copy().items():
            table.add_row(Spinner("dots", style="cyan"), name, self._processes[name].address, Text(reason, "dim"))
        return table
