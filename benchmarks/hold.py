"""Holds processes to a share of a core, so that what would need more cores than there are can be measured.

A process that has used up its share is stopped (SIGSTOP) until it has earned the next moment. Latencies mean nothing
then; throughput is that of slower cores.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.004
MAX_SAVED_S = 0.02


class _Held:
    def __init__(self, process: psutil.Process, share: float) -> None:
        self._process = process
        self._share = share
        self._used = self._cpu_s()
        self._budget = 0.0
        self._stopped = False

    def _cpu_s(self) -> float:
        """Of all its threads, to the nanosecond."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def look(self, passed_s: float) -> None:
        used = self._cpu_s()
        self._budget = min(self._budget + passed_s * self._share, MAX_SAVED_S) - (used - self._used)
        self._used = used
        if (self._budget < 0) is not self._stopped:
            self._stopped = not self._stopped
            self._process.send_signal(signal.SIGSTOP if self._stopped else signal.SIGCONT)

    def let_go(self) -> None:
        if self._stopped:
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def held(processes: Sequence[psutil.Process], share: float) -> Iterator[None]:
    """Each of the processes gets this share of one core, in (0, 1)."""
    over = threading.Event()

    def watch() -> None:
        ones, last = [_Held(process, share) for process in processes], time.monotonic()
        while not over.wait(LOOK_EVERY_S):
            now = time.monotonic()
            for one in ones:
                one.look(now - last)
            last = now
        for one in ones:
            one.let_go()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
