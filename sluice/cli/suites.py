"""The suites of `sluice up` that run under this user, so that other commands find them without --gateway.

Each keeps a file in the user's state folder and locks it as long as it runs: a file without a lock was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20
"""Bytes of the file of a running suite that are read; a longer one is ignored."""


@dataclass(frozen=True)
class RunningSuite:
    """A running suite.

    Attributes:
        pid: of `sluice up`.
        url: of the gateway.
        model: served name; empty if not known at the start.
        tls: folder of its certificates; empty for plain text.
        processes: for each process its name, address and process id.
    """

    pid: int
    url: str
    model: str = ""
    tls: str = ""
    processes: list[dict[str, Any]] = field(default_factory=list)


def folder() -> Path:
    """Returns where the files are: $XDG_STATE_HOME/sluice, by default ~/.local/state/sluice."""
    base = os.environ.get("XDG_STATE_HOME", "")
    home = os.path.expanduser("~")
    return (Path(base) if os.path.isabs(base) else Path(home, ".local", "state")) / "sluice"


def running_suites() -> list[RunningSuite]:
    """Returns the suites that run, the oldest first; files that ended ones left behind are removed."""
    try:
        files = sorted(folder().glob("suite-*.json"), key=lambda file: file.stat().st_ctime)
    except OSError:
        return []
    return [suite for file in files if (suite := _read(file)) is not None]


def _read(file: Path) -> RunningSuite | None:
    try:
        with file.open("rb") as opened:
            if _lock(opened.fileno(), fcntl.LOCK_SH):
                file.unlink(missing_ok=True)
                return None
            return RunningSuite(**json.loads(opened.read(_MAX_BYTES)))
    except (OSError, ValueError, TypeError):
        return None  # it ends or starts at this moment


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class SuiteFile:
    """The file of a suite that this process runs; it appears with the first `write`."""

    def __init__(self) -> None:
        self._path = folder() / f"suite-{os.getpid()}.json"
        self._descriptor: int | None = None

    def write(self, suite: RunningSuite) -> None:
        """Writes the suite; raises OSError if the folder cannot be written."""
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _lock(self._descriptor, fcntl.LOCK_EX)
        content = json.dumps(asdict(suite)).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)

    def remove(self) -> None:
        """Removes the file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
