"""What this machine offers: some faults need root, network namespaces, a control group or a second source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def _is_root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _has_namespaces() -> str:
    if problem := _is_root():
        return problem
    if shutil.which("ip") is None:
        return "needs `ip` of iproute2"
    name = f"sluice-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


def _has_filter() -> str:
    return "" if shutil.which("iptables") else "needs `iptables`"


def _has_socket_killer() -> str:
    return "" if shutil.which("ss") else "needs `ss` of iproute2"


def _has_tap() -> str:
    return "" if Path("/dev/net/tun").exists() else "needs /dev/net/tun"


def memory_cgroups() -> Path | None:
    """Returns the folder in which a control group for memory can be made; None: there is none."""
    for folder, file in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        if not folder.is_dir():
            continue
        probe = folder / f"sluice-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        has_limit = (probe / file).exists()
        probe.rmdir()
        if has_limit:
            return folder
    return None


def _has_cgroup() -> str:
    return _is_root() or ("" if memory_cgroups() is not None else "needs control groups with the memory controller")


def _can_mount() -> str:
    return _is_root() or ("" if shutil.which("mount") else "needs `mount`")


def _has_compiler() -> str:
    return "" if shutil.which("cc") else "needs a C compiler, `cc`"


NEEDS: Mapping[str, Callable[[], str]] = {
    "namespaces": _has_namespaces,
    "filter": _has_filter,
    "sockets": _has_socket_killer,
    "tap": _has_tap,
    "cgroup": _has_cgroup,
    "mount": _can_mount,
    "clock": _has_compiler,
}
"""By name, a function that says what is missing; nothing: it is there."""


class Host:
    """The machine; each need is looked up once."""

    def __init__(self, needs: Mapping[str, Callable[[], str]] = NEEDS) -> None:
        self._needs = needs
        self._found: dict[str, str] = {}

    def lacks(self, *needs: str) -> str:
        """Returns what of several needs is missing, in words; nothing: all are there."""
        for need in needs:
            if need not in self._found:
                self._found[need] = self._needs[need]()
        return "; ".join(dict.fromkeys(problem for need in needs if (problem := self._found[need])))


def described() -> str:
    """Returns the machine in words."""
    system = os.uname()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} CPUs, {memory_gib:.0f} GiB, {system.sysname} {system.release} {system.machine}"
