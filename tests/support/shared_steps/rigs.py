"""The rigs' common parts: the fault, the outcome, and the register of rigs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from services.common.base.errors import SluiceError

ROWS = 21
INJECTED = "injected failure 7f3a"
"""Text of the injected exception, which no client may see."""


class Fault:
    """Raises at one of the calls that a step makes for one row, and at all later ones.

    A rig calls `at` wherever foreign or fallible code runs for a row, or wraps that code in `wrap`.

    Args:
        row: the row that fails, 0 to ROWS - 1; None: no row.
        point: the index of the call at which it fails, among the calls for the row.

    Attributes:
        raised: whether the fault has occurred; a rig's points are exhausted when a run ends without it.
    """

    def __init__(self, row: int | None = None, point: int = 0) -> None:
        self.row = row
        self.point = point
        self.raised = False
        self._calls = 0

    def due(self, row: int | None) -> bool:
        """Returns whether the row fails now; for rigs that inject a bad value instead of an exception."""
        if row is None or row != self.row:
            return False
        self._calls += 1
        self.raised = self._calls > self.point
        return self.raised

    def at(self, row: int | None) -> None:
        """Raises RuntimeError if the row fails at this call or failed before."""
        if self.due(row):
            raise RuntimeError(INJECTED)

    def wrap(self, function: Callable[..., Any], row: Callable[..., int | None]) -> Callable[..., Any]:
        """Returns the function, which first calls `at` for the row that `row` returns of its arguments."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.at(row(*args, **kwargs))
            return function(*args, **kwargs)

        return wrapped


@dataclass
class Outcome:
    """What came of a run with rows 0 to ROWS - 1.

    Attributes:
        outputs: the complete output of each row, in any form that can be compared.
        errors: the errors of the rows that ended with one.
        alive: whether the session, batch or pipeline works for another row afterwards; the rig tries it.
    """

    outputs: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, SluiceError] = field(default_factory=dict)
    alive: bool = True


Rig: TypeAlias = "Callable[[Fault], Any]"
"""Runs a step with ROWS rows under a fault; returns an Outcome, or an awaitable of one."""

RIGS: dict[str, Rig] = {}


def rig(step: str) -> Callable[[Rig], Rig]:
    """Registers the rig of a declared step."""

    def register(run: Rig) -> Rig:
        assert step not in RIGS, f"{step} has two rigs"
        RIGS[step] = run
        return run

    return register
