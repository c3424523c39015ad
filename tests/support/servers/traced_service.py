"""Runs a service and records which of its modules run: `python -m tests.support.servers.traced_service MODULE FLAG…`.

SIGUSR1 starts a recording; SIGUSR2 writes it to the file `TRACED/PID`: a line for each call from one module to another.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "TRACED"
ROOT = Path(__file__).resolve().parents[3]

_calls: list[str] = []


def _record(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call" and (not _calls or _calls[-1] != frame.f_code.co_filename):
        _calls.append(frame.f_code.co_filename)


def _start(number: int, frame: FrameType | None) -> None:
    _calls.clear()
    sys.setprofile(_record)


def _write(number: int, frame: FrameType | None) -> None:
    sys.setprofile(None)
    services = f"{ROOT / 'services'}{os.sep}"
    lines = [name.removeprefix(services) for name in _calls if name.startswith(services)]
    target = Path(os.environ[FOLDER]) / str(os.getpid())
    target.with_suffix(".new").write_text("\n".join(lines))
    target.with_suffix(".new").replace(target)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _start)
    signal.signal(signal.SIGUSR2, _write)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
