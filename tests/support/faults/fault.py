"""A fault, and the scene in which it happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.host import Host
from tests.support.faults.parts import Part
from tests.support.faults.place import Place

OTHER_TREE = "other tree"
"""What upgrades need, besides what a machine offers."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a fault happens.

    Attributes:
        other: another source tree, for upgrades.
    """

    place: Place
    part: Part
    other: Path | None = None

    @property
    def victim(self) -> str:
        """The process that is disturbed."""
        return self.part.victim


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        inject: lets it happen and undoes it; returns when it is undone and the suite whole.
        needs: of the machine, as in host.NEEDS, or OTHER_TREE.
        parts: to which it can happen; empty: to all.
        topology: of the suite in which it happens; empty: the part's.
    """

    name: str
    about: str
    inject: Callable[[Scene], Awaitable[None]]
    needs: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    topology: str = ""

    def not_run(self, part: Part, host: Host, other: Path | None) -> str:
        """Returns why the fault cannot happen to a part here; nothing: it can."""
        if OTHER_TREE in self.needs and other is None:
            return "needs another version of the source tree: --other TREE"
        needs = dict.fromkeys((*part.needs, *self.needs))
        return host.lacks(*(need for need in needs if need != OTHER_TREE))

    def concerns(self, part: Part) -> bool:
        """Whether the fault can happen to a part at all."""
        return not self.parts or part.name in self.parts
