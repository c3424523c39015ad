"""Runs a module as `__main__` in a process that the kernel ends together with its parent.

Usage: python -P -m sluice.cli.child PARENT_PID MODULE [ARGUMENTS...]. The kernel forgets the wish when a process forks,
not when it imports, so it is made here, in the process that becomes the service.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with(parent: int) -> None:
    """Ends this process as soon as its parent is gone; at once when it already is."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # it died before the wish was made
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def main() -> None:
    """Becomes the module."""
    _, parent, module, *arguments = sys.argv
    die_with(int(parent))
    # Last, not first: the user's own engines are found here, but a folder named like ours does not hide ours.
    sys.path.append(os.getcwd())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
