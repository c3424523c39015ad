"""Ports of this machine: which are free, and why one cannot be used."""

from __future__ import annotations

import errno
import random
import socket

# Below the range from which the kernel takes ports for outgoing connections: a port that is free now stays free.
_FREE_RANGE = range(20_000, 32_000)


TAKEN = "the port is taken"


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


class FreePorts:
    """Hands out free ports, none of them twice."""

    def __init__(self) -> None:
        self._candidates = iter(random.sample(_FREE_RANGE, len(_FREE_RANGE)))

    def take(self, host: str = "127.0.0.1") -> int:
        """A port on which nothing listens now; OSError when there is none."""
        for port in self._candidates:
            if not problem(host, port):
                return port
        raise OSError("no free port is left")
