"""Ports of this machine: which are free, and why one cannot be used."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from itertools import chain

FREE_RANGE = range(20_000, 32_000)
"""Below the range from which the kernel takes ports for outgoing connections: a port that is free now stays free."""

TAKEN = "the port is taken"

_claims: list[socket.socket] = []


def problem(host: str, port: int) -> str:
    """Why nothing can listen on host:port, in a few words; empty when something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # leftovers of closed connections do not count
            probe.bind((host, port))
            probe.listen(1)
    except socket.gaierror:
        return "the host name is not known"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return TAKEN
        if error.errno == errno.EADDRNOTAVAIL:
            return "the address is not one of this machine"
        return (error.strerror or str(error)).lower()
    return ""


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens, and that no other process of ours is given while this one lives.

    Raises:
        OSError: there is none.
    """
    return free_row(1, host)


def free_row(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` such ports in a row; OSError when there are none."""
    for first in _anywhere(count):
        claims = [_claim(port) if not problem(host, port) else None for port in range(first, first + count)]
        got = [claim for claim in claims if claim is not None]
        if len(got) == count:
            _claims.extend(got)
            return first
        for claim in got:
            claim.close()
    raise OSError(f"there are no {count} free ports in a row" if count > 1 else "there is no free port")


def _anywhere(count: int) -> Iterator[int]:
    begins = range(FREE_RANGE.start, FREE_RANGE.stop - count + 1)
    middle = random.randrange(len(begins))
    return chain(begins[middle:], begins[:middle])


def _claim(port: int) -> socket.socket | None:
    """Time passes before a port is listened on; a name in the kernel's keeping holds it for us until we end."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0sluice-port-{port}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return None
        # A system without such names: the port is given all the same.
    return claim
