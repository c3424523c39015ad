"""Why an engine's own process ended: one line in the log, and a file in which the worker reads it."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

LONGEST = 500


class CrashReason(logging.Filter):
    """Of the traceback with which an engine's process ends, its last line.

    Args:
        path: file to write.
        beginning: how the engine's own message begins.
    """

    def __init__(self, path: Path, beginning: str) -> None:
        super().__init__()
        self._path = path
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        text = record.getMessage()
        if text.startswith(self._beginning):
            error = record.exc_info[1] if record.exc_info else None
            if error is not None:
                text = " ".join("".join(traceback.format_exception_only(error)).split())
            reason = text.strip().splitlines()[-1].strip()[:LONGEST]
            self._path.write_text(reason, "utf-8")
            record.msg, record.args, record.exc_info = f"The engine's process ends: {reason}", (), None
        return True


def read(path: Path) -> str:
    """What was written; empty: nothing."""
    try:
        return path.read_text("utf-8")[:LONGEST]
    except OSError:
        return ""


def missing_from(source: str) -> str:
    """One sentence about a folder that holds no model, to explain a start that failed; empty: nothing is missing."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "params.json")):
        return f"The model folder {source} has no config.json; name a folder that holds a model."
    return ""
