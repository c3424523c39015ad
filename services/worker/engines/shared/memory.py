"""Available memory of this machine or container."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Returns the bytes usable without swapping and within the container's limit; None if neither is reported."""
    found = [available for available in (_machine(), _container()) if available is not None]
    return min(found, default=None)


def _machine() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _container() -> int | None:
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""
