"""Reports why an engine process exited: one log line, and a file that the worker reads."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

MAX_REASON_CHARS = 500
"""Characters of the reason for which an engine's process ended; the rest is left out."""


class CrashReason(logging.Filter):
    """Replaces the traceback of a failing engine process by its last line, and writes that line to a file.

    Args:
        path: File to write.
        prefix: Start of the engine's log message to match.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        super().__init__()
        self._path = path
        self._prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        """Writes the reason of a matching record and shortens the record; keeps every record."""
        text = record.getMessage()
        if text.startswith(self._prefix):
            error = record.exc_info[1] if record.exc_info else None
            if error is not None:
                text = " ".join("".join(traceback.format_exception_only(error)).split())
            reason = text.strip().splitlines()[-1].strip()[:MAX_REASON_CHARS]
            self._path.write_text(reason, "utf-8")
            record.msg, record.args, record.exc_info = f"The engine process exits: {reason}", (), None
        return True


def read(path: Path) -> str:
    """Returns the recorded reason, or an empty string when none was written."""
    try:
        return path.read_text("utf-8")[:MAX_REASON_CHARS]
    except OSError:
        return ""


def missing_from(source: str) -> str:
    """Returns an explanation for a failed start when `source` is a folder without a model, else an empty string."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "params.json")):
        return f"The model folder {source} has no config.json; use a folder that contains a model."
    return ""
