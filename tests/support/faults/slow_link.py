"""Connects two TAP interfaces that it makes: `python slow_link.py NAME0 NAME1 SECONDS`; frames from the first wait.

In place of `tc netem`, which many kernels lack. Prints a line when both interfaces are there, and runs until killed.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 1 << 16


def tap(name: str) -> int:
    """Makes an interface; returns its file descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def main(first: str, second: str, delay_s: float) -> None:
    """Passes frames on."""
    one, other = tap(first), tap(second)
    print("ready", flush=True)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([one, other], [], [], left_s)
        if one in readable:
            waiting.append((time.monotonic() + delay_s, os.read(one, FRAME_BYTES)))
        if other in readable:
            _write(one, os.read(other, FRAME_BYTES))
        while waiting and waiting[0][0] <= time.monotonic():
            _write(other, waiting.popleft()[1])


def _write(descriptor: int, frame: bytes) -> None:
    try:
        os.write(descriptor, frame)
    except OSError:  # the interface is not up yet, or its queue is full: frames get lost
        pass


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
