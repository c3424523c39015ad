"""Ports of this machine: which are free, and why one cannot be used."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from itertools import chain

FREE_RANGE = range(20_000, 32_000)
"""Below the kernel's range for outgoing connections, so a port that is free now stays free."""

TAKEN = "the port is taken"

_claims: list[socket.socket] = []


def problem(host: str, port: int) -> str:
    """Returns a short reason why nothing can listen on host:port; empty when something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
            probe.bind((host, port))
            probe.listen(1)
    except socket.gaierror:
        return "the host name cannot be resolved"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return TAKEN
        if error.errno == errno.EADDRNOTAVAIL:
            return "the address is not one of this machine"
        return (error.strerror or str(error)).lower()
    return ""


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port on which nothing listens, reserved among Sluice processes while this one lives.

    Raises:
        OSError: no port is free.
    """
    return free_row(1, host)


def free_row(count: int, host: str = "127.0.0.1") -> int:
    """Returns the first of `count` consecutive free ports; raises OSError when there are none."""
    for first in _candidate_starts(count):
        claims = [_claim(port) if not problem(host, port) else None for port in range(first, first + count)]
        claimed = [claim for claim in claims if claim is not None]
        if len(claimed) == count:
            _claims.extend(claimed)
            return first
        for claim in claimed:
            claim.close()
    raise OSError(f"no {count} consecutive ports are free" if count > 1 else "no port is free")


def _candidate_starts(count: int) -> Iterator[int]:
    starts = range(FREE_RANGE.start, FREE_RANGE.stop - count + 1)
    middle = random.randrange(len(starts))
    return chain(starts[middle:], starts[:middle])


def _claim(port: int) -> socket.socket | None:
    """Reserves a port until this process ends by binding an abstract socket; None if it is already reserved."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0sluice-port-{port}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return None
        # Abstract sockets are unavailable on this system: use the port without a reservation.
    return claim
