"""The ports of the workers of running servers."""

from __future__ import annotations

from collections.abc import Collection

from services.common.net.ports import free_port


class WorkerPorts:
    """Assigns a port to each worker, which keeps it when it is restarted; ports of removed workers are used again.

    Args:
        first: the first port of a range without gaps; 0: any free ports.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._ports: dict[str, int] = {}

    def of(self, name: str, present: Collection[str]) -> int:
        """Returns the port of a worker.

        Args:
            present: names of the workers that run or still stop, whose ports are taken.
        """
        if name in self._ports:
            return self._ports[name]
        gone = next((one for one in self._ports if one not in present), None)
        if gone is not None:
            port = self._ports.pop(gone)
        elif self._first:
            port = self._first + len(self._ports)
        else:
            port = free_port()
        self._ports[name] = port
        return port
