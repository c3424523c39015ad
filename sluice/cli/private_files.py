"""Writes files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path

MODE = 0o600


def write(path: Path, content: bytes, mode: int = MODE) -> None:
    """Writes a file atomically; it is never readable beyond `mode`, by default by its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    os.replace(temporary, path)
