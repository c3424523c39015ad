"""Reloads files that may be replaced while the process runs: certificates, keys, tokens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from services.common.base.errors import SluiceError

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0

T = TypeVar("T")
_State = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[T]):
    """The parsed content of a set of files, reloaded when one of them changes.

    Reading `value` checks the files at most once a second; there is no thread and no timer. Files that disappear, are
    unreadable or do not match each other (yet) change nothing: the last valid content stays, and one warning is logged.
    A check takes microseconds; the files must not be on a network file system.

    Args:
        what: name of the files in log lines, such as ``the token file``.
        paths: the files.
        load: parses them; raises SluiceError when their content is invalid.

    Raises:
        SluiceError: when the initial load fails.

    Attributes:
        generation: how many times the files were loaded.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self.generation = 1
        self._what = what
        self._paths = paths
        self._load = load
        self._lock = Lock()
        self._last_warning = ""
        self._checked_at = time.monotonic()
        self._state = self._stat()
        self._value = load()

    @property
    def value(self) -> T:
        """The current content of the files; may be read from any thread."""
        if time.monotonic() - self._checked_at >= CHECK_EVERY_S and self._lock.acquire(blocking=False):
            try:
                self._checked_at = time.monotonic()
                self._reload()
            finally:
                self._lock.release()
        return self._value

    def _stat(self) -> _State | None:
        try:
            stats = [os.stat(path) for path in self._paths]
        except OSError:
            return None
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in stats)

    def _reload(self) -> None:
        state = self._stat()
        if state is not None and state == self._state:
            return
        try:
            value = self._load()
        except SluiceError as error:
            self._warn(error.message)
            return
        if self._stat() != state:
            return  # the files are being written: the next check reloads them
        self._value, self._state, self._last_warning = value, state, ""
        self.generation += 1
        log.info("%s was reloaded", self._what, extra={"files": ", ".join(map(str, self._paths))})

    def _warn(self, reason: str) -> None:
        if reason != self._last_warning:
            self._last_warning = reason
            log.warning("%s The previous content stays in use.", reason)
