"""Files that may be replaced while the process runs: certificates, keys, tokens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from services.common.errors import SluiceError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

T = TypeVar("T")
_State = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[T]):
    """What some files hold together, read again when one of them has changed.

    Whoever asks for `value` looks at the files at most every second; there is no thread and no timer. Files that
    vanish, that cannot be read, or that do not fit together (yet) change nothing: what was read last stays true, and
    one line of the log says so. Looking takes microseconds; the files must not be on a network file system.

    Args:
        what: in words for the log, such as ``the token file``.
        paths: the files.
        load: reads them; raises SluiceError when they do not hold what they should.

    Raises:
        SluiceError: when they cannot be loaded at first.

    Attributes:
        generation: counts the times that they were loaded.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self.generation = 1
        self._what = what
        self._paths = paths
        self._load = load
        self._lock = Lock()
        self._complaint = ""
        self._looked_at = time.monotonic()
        self._state = self._look()
        self._value = load()

    @property
    def value(self) -> T:
        """What the files hold now. May be asked from any thread."""
        if time.monotonic() - self._looked_at >= LOOK_EVERY_S and self._lock.acquire(blocking=False):
            try:
                self._looked_at = time.monotonic()
                self._look_again()
            finally:
                self._lock.release()
        return self._value

    def _look(self) -> _State | None:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError:
            return None
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def _look_again(self) -> None:
        state = self._look()
        if state is not None and state == self._state:
            return
        try:
            value = self._load()
        except SluiceError as error:
            self._complain(error.message)
            return
        if self._look() != state:
            return  # somebody is writing: the next look sees all of it
        self._value, self._state, self._complaint = value, state, ""
        self.generation += 1
        log.info("%s was read again", self._what, extra={"files": ", ".join(map(str, self._paths))})

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning("%s What was read before stays valid.", why)
