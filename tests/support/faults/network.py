"""A private network: this process and its children in one namespace, victims each in one of their own behind a bridge.

Nothing outside sees it, nor the mounts that are made in it, and both end with their processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
BRIDGE = "suite"
SUBNET = "10.77.0"
_entered = False


def run(*command: str) -> None:
    """Runs a command.

    Raises:
        RuntimeError: with what it said, when it fails.
    """
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()}")


def enter_private_network() -> None:
    """Moves this thread, and the threads and processes that it will start, into a network and mounts of their own."""
    global _entered
    if _entered:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS | CLONE_NEWNET)")
    run("mount", "--make-rprivate", "/")
    run("ip", "link", "set", "lo", "up")
    _entered = True


class Network:
    """The bridge, and victims' namespaces by name of the process."""

    def __init__(self, victims: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(victims, 2)}
        self._slow: subprocess.Popen[bytes] | None = None

    @property
    def own_host(self) -> str:
        """The address of this process and of all that are no victims."""
        return f"{SUBNET}.1"

    def host(self, name: str) -> str:
        """The address of a victim."""
        return f"{SUBNET}.{self._numbers[name]}"

    def namespace(self, name: str) -> str:
        """The namespace of a victim."""
        return f"sluice-{os.getpid()}-{self._numbers[name]}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """What runs a command as a victim."""
        return ("ip", "netns", "exec", self.namespace(name))

    def inside(self, name: str, *command: str) -> None:
        """Runs a command where a victim is."""
        run(*self.prefix(name), *command)

    def __enter__(self) -> Self:
        enter_private_network()
        try:
            run("ip", "link", "add", BRIDGE, "type", "bridge")
            run("ip", "address", "add", f"{self.own_host}/24", "dev", BRIDGE)
            run("ip", "link", "set", BRIDGE, "up")
            for name in self._numbers:
                self._connect(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, name: str) -> None:
        run("ip", "netns", "add", self.namespace(name))
        run("ip", "link", "add", self._cable(name), "type", "veth", "peer", "name", "inner")
        run("ip", "link", "set", "inner", "netns", self.namespace(name))
        run("ip", "link", "set", self._cable(name), "master", BRIDGE, "up")
        self.inside(name, "ip", "address", "add", f"{self.host(name)}/24", "dev", "inner")
        self.inside(name, "ip", "link", "set", "inner", "up")
        self.inside(name, "ip", "link", "set", "lo", "up")

    def _cable(self, name: str) -> str:
        return f"cable{self._numbers[name]}"

    def unplug(self, name: str) -> None:
        """Lets nothing pass in either direction."""
        run("ip", "link", "set", self._cable(name), "nomaster")

    def plug(self, name: str) -> None:
        """Undoes `unplug`."""
        run("ip", "link", "set", self._cable(name), "master", BRIDGE)

    def slow_down(self, name: str, delay_s: float) -> None:
        """Holds back every frame that a victim sends."""
        folder = Path(__file__).parent
        self._slow = subprocess.Popen(
            [sys.executable, str(folder / "slow_link.py"), "slow0", "slow1", str(delay_s)], stdout=subprocess.PIPE
        )
        assert self._slow.stdout is not None
        self._slow.stdout.readline()  # both interfaces are there
        run("ip", "link", "add", "detour", "type", "bridge")
        run("ip", "link", "set", "detour", "up")
        run("ip", "link", "set", "slow0", "master", "detour", "up")
        run("ip", "link", "set", "slow1", "master", BRIDGE, "up")
        run("ip", "link", "set", self._cable(name), "master", "detour")

    def speed_up(self, name: str) -> None:
        """Undoes `slow_down`."""
        self.plug(name)
        run("ip", "link", "delete", "detour")
        self._end_slow()

    def _end_slow(self) -> None:
        if self._slow is not None:
            self._slow.send_signal(signal.SIGKILL)
            self._slow.wait(10)
            self._slow = None

    def close(self) -> None:
        """Removes everything."""
        self._end_slow()
        for name in self._numbers:
            subprocess.run(["ip", "netns", "delete", self.namespace(name)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", "detour"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)
