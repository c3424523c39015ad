"""Injects faults of real engines for tests.

crash=STEPS        exits like kill -9 after a number of engine steps; 0 or no value: at the next step
hang               stops stepping; requests wait
slow=FACTOR        multiplies the duration of every step
drop_events        publishes no KV events
double_events      publishes every KV event twice
error_after=TOKENS fails every request after a number of tokens
refuse             rejects requests as if the engine had exited
none               removes all faults
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from services.common.errors import ErrorKind, SluiceError, invalid

CRASH_CODE = 137
_NAMES = ("crash", "hang", "slow", "drop_events", "double_events", "error_after", "refuse")


@dataclass(frozen=True, slots=True)
class Faults:
    """The active faults. `crash_in` counts steps (None: no crash); `error_after` counts tokens (0: no error)."""

    crash_in: int | None = None
    hang: bool = False
    slow: float = 1.0
    events: int = 1  # how often each event is published
    error_after: int = 0
    refuse: bool = False
    die: Callable[[int], object] = field(default=os._exit, compare=False)

    def with_fault(self, text: str) -> Faults:
        """Returns these faults with NAME or NAME=VALUE added; raises SluiceError(INVALID_ARGUMENT) if unknown."""
        name, _, value = text.strip().partition("=")
        match name:
            case "none":
                return Faults(die=self.die)
            case "crash":
                return replace(self, crash_in=int(_number(name, value or "0", minimum=0)))
            case "hang":
                return replace(self, hang=True)
            case "refuse":
                return replace(self, refuse=True)
            case "slow":
                return replace(self, slow=_number(name, value, minimum=0))
            case "drop_events":
                return replace(self, events=0)
            case "double_events":
                return replace(self, events=2)
            case "error_after":
                return replace(self, error_after=int(_number(name, value, minimum=1)))
        raise invalid(f"Fault {name!r} is unknown; choose from {', '.join((*_NAMES, 'none'))}.", param="fault")

    def with_all(self, texts: Iterable[str]) -> Faults:
        """Returns these faults with several added, in order."""
        faults = self
        for text in texts:
            faults = faults.with_fault(text)
        return faults

    def after_step(self) -> Faults:
        """Counts a step towards a crash; does not return when it crashes."""
        if self.crash_in is None:
            return self
        if self.crash_in <= 0:
            self.die(CRASH_CODE)
        return replace(self, crash_in=self.crash_in - 1)

    def __str__(self) -> str:
        values = {
            "crash": self.crash_in,
            "slow": self.slow if self.slow != 1 else None,
            "error_after": self.error_after or None,
        }
        flags = {
            "hang": self.hang,
            "refuse": self.refuse,
            "drop_events": self.events == 0,
            "double_events": self.events == 2,
        }
        names = [f"{name}={value:g}" for name, value in values.items() if value is not None]
        return ",".join([*names, *(name for name, is_set in flags.items() if is_set)]) or "none"


def injected(what: str, kind: ErrorKind = ErrorKind.INTERNAL) -> SluiceError:
    """Returns the error of an injected fault; retryable on another worker."""
    return SluiceError(kind, f"A fault was injected: {what}.", code="injected_fault", retryable=True)


def _number(name: str, text: str, minimum: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not minimum <= value < 1e9:
        raise invalid(f"Fault {name} requires a number of at least {minimum:g}, as in {name}=5.", param="fault")
    return value
