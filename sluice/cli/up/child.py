"""Runs a module as `__main__` in a process that ends with its parent, however the parent ends.

Usage: python -P -m sluice.cli.up.child PARENT_PID MODULE [ARGUMENTS...]. Must be the leader of a process group: child
processes of the module end as well.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

import services  # before the user's folder is on the path, where another one may have that name

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_GRACE_S = 4.0


def die_with(parent: int) -> None:
    """Ends this process when its parent does: SIGTERM at once, SIGKILL to the whole group a little later."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)
    threading.Thread(target=_kill_group_after, args=(parent,), name="parent-watch", daemon=True).start()


def _kill_group_after(parent: int) -> None:
    """Kills processes that ignore the kernel's SIGTERM, and the module's children, which do not receive it."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    if sys.platform != "linux":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Runs the module given on the command line."""
    _, parent, module, *arguments = sys.argv
    die_with(int(parent))
    assert services.__path__
    sys.path.append(os.getcwd())  # makes custom engines importable
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        service = module.rpartition(".")[2]
        sys.exit(
            f"The interpreter {sys.executable} lacks the package {error.name}; install sluice-llm[{service}] for it."
        )


if __name__ == "__main__":
    main()
