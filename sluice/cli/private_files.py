"""Files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path

MODE = 0o600


def write(path: Path, content: bytes, mode: int = MODE) -> None:
    """Writes a file in one step, readable by its owner alone, or as `mode` says, from the first moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    opened = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(opened, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    os.replace(fresh, path)
