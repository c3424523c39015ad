"""Stores what gateways share about the workers they operate: adapters to keep loaded, and workers that sleep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Literal

from services.common.base.errors import ErrorKind, SluiceError

Kind = Literal["adapters", "asleep"]
MAX_ENTRIES = 1_024
"""Adapters, and sleeping workers, that operators can store; one more is refused with FAILED_PRECONDITION."""


class FleetStore(ABC):
    """Short texts by kind and name."""

    @abstractmethod
    async def all(self, kind: Kind) -> dict[str, str]:
        """Returns the values of a kind by name; raises SluiceError(UNAVAILABLE) while the store is unreachable."""

    @abstractmethod
    async def put(self, kind: Kind, name: str, value: str) -> None:
        """Sets a value.

        Raises:
            SluiceError: FAILED_PRECONDITION if there are `MAX_ENTRIES` others, UNAVAILABLE as `all`.
        """

    @abstractmethod
    async def remove(self, kind: Kind, name: str) -> bool:
        """Removes a value; returns whether it was there. Raises SluiceError(UNAVAILABLE) as `all`."""

    async def close(self) -> None:  # noqa: B027 - only some stores have connections
        """Releases the store's connections."""


class MemoryFleetStore(FleetStore):
    """Keeps everything in this gateway."""

    def __init__(self) -> None:
        self._values: dict[Kind, dict[str, str]] = defaultdict(dict)

    async def all(self, kind: Kind) -> dict[str, str]:
        return dict(self._values[kind])

    async def put(self, kind: Kind, name: str, value: str) -> None:
        values = self._values[kind]
        if name not in values and len(values) >= MAX_ENTRIES:
            raise store_full(kind)
        values[name] = value

    async def remove(self, kind: Kind, name: str) -> bool:
        return self._values[kind].pop(name, None) is not None


def store_full(kind: Kind) -> SluiceError:
    """Returns the error of a value too many."""
    what = "adapters are kept loaded; unload one" if kind == "adapters" else "workers sleep; wake some"
    return SluiceError(ErrorKind.FAILED_PRECONDITION, f"{MAX_ENTRIES} {what}.")
