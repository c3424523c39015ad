"""The processes of a suite: which they are, what CPU and memory they use, and how to start one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

_ROOT = Path(__file__).resolve().parents[1]
_STOPS_WITHIN_S = 10.0


def suite_of(port: int) -> dict[str, psutil.Process]:
    """The processes of the `sluice up` whose gateway listens on `port`, by name; empty when there is none here."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "services.gateway" in line and any(word.endswith(f":{port}") for word in line):
            parent = process.parent()
            siblings = parent.children() if parent is not None else [process]
            return _named(siblings)
    return {}


def _named(processes: Sequence[psutil.Process]) -> dict[str, psutil.Process]:
    named: dict[str, psutil.Process] = {}
    seen: Counter[str] = Counter()
    for process in processes:
        line = process.cmdline()
        kind = next((word.removeprefix("services.") for word in line if word.startswith("services.")), "")
        if not kind:
            continue
        name = line[line.index("--worker-id") + 1] if "--worker-id" in line else kind
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name}-{seen[name]}"] = process
    return named


def parse_pids(texts: Sequence[str]) -> dict[str, psutil.Process]:
    """Reads name=PID pairs; ValueError says what is wrong."""
    found = {}
    for text in texts:
        name, _, pid = text.partition("=")
        if not name or not pid.isdigit() or not psutil.pid_exists(int(pid)):
            raise ValueError(f"{text!r} is no NAME=PID of a running process")
        found[name] = psutil.Process(int(pid))
    return found


def cpu_seconds(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """CPU time used so far, user and system, child processes included."""
    return {name: _sum(process, _cpu) for name, process in processes.items()}


def resident_bytes(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Resident memory now, child processes included."""
    return {name: _sum(process, lambda one: float(one.memory_info().rss)) for name, process in processes.items()}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _sum(process: psutil.Process, of: Callable[[psutil.Process], float]) -> float:
    return sum(of(one) for one in [process, *process.children(recursive=True)])


@contextmanager
def own_suite(
    workers: int,
    speedup: float,
    arguments: Sequence[str] = (),
    tree: Path | None = None,
    added: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Runs `sluice up` on free ports, of another checkout if `tree` is one; gives its URL.

    Args:
        added: environment variables, besides those of this process.

    Raises:
        RuntimeError: with its log, when it does not come up.
    """
    environment = {**os.environ, **({} if tree is None else {"PYTHONPATH": str(tree)}), **(added or {})}
    command = [sys.executable, "-m", "sluice.cli.main", "up", "--port", "0", "--base-grpc-port", "0"]
    command += ["--workers", str(workers), "--speedup", str(speedup), "--log-level", "warning", *arguments]
    if tree is None and "--restart" not in arguments:
        command.append("--no-restart")  # a service that ends must not go unnoticed; a revision may not have the flag
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=tree, env=environment) as suite,
    ):
        assert suite.stdout is not None
        try:
            line = suite.stdout.readline()
            if not line.startswith("ready "):
                suite.wait(_STOPS_WITHIN_S)
                log.seek(0)
                raise RuntimeError(f"sluice up did not come up:\n{log.read()}")
            yield line.split()[1]
        finally:
            suite.terminate()
            suite.wait(_STOPS_WITHIN_S)


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Checks out a commit of this repository in a folder of its own, which is removed at the end."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=_ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=_ROOT, check=True)
