"""Faults on demand: what can go wrong with a real engine, as often as a test needs it.

crash=STEPS        the process ends, as by kill -9, after so many more engine steps; 0 or nothing: at the next one
hang               the engine stops stepping; requests wait
slow=FACTOR        every step takes so many times as long
drop_events        changes of the cache are not told
double_events      changes of the cache are told twice
error_after=TOKENS every request fails after so many tokens
refuse             requests are refused as the engine being gone
none               all of this ends
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
    """What is wrong now. `crash_in` counts steps, None: no crash; `error_after` counts tokens, 0: no error."""

    crash_in: int | None = None
    hang: bool = False
    slow: float = 1.0
    events: int = 1  # how often each is told
    error_after: int = 0
    refuse: bool = False
    die: Callable[[int], object] = field(default=os._exit, compare=False)

    def with_fault(self, text: str) -> Faults:
        """Adds one fault, as NAME or NAME=VALUE; SluiceError(INVALID_ARGUMENT) when there is no such fault."""
        name, _, value = text.strip().partition("=")
        match name:
            case "none":
                return Faults(die=self.die)
            case "crash":
                return replace(self, crash_in=int(_number(name, value or "0", least=0)))
            case "hang":
                return replace(self, hang=True)
            case "refuse":
                return replace(self, refuse=True)
            case "slow":
                return replace(self, slow=_number(name, value, least=0))
            case "drop_events":
                return replace(self, events=0)
            case "double_events":
                return replace(self, events=2)
            case "error_after":
                return replace(self, error_after=int(_number(name, value, least=1)))
        raise invalid(f"Fault {name!r} is unknown; choose from {', '.join((*_NAMES, 'none'))}.", param="fault")

    def with_all(self, texts: Iterable[str]) -> Faults:
        """Adds several, in order."""
        faults = self
        for text in texts:
            faults = faults.with_fault(text)
        return faults

    def after_step(self) -> Faults:
        """Counts a step towards a crash, which does not return."""
        if self.crash_in is None:
            return self
        if self.crash_in <= 0:
            self.die(CRASH_CODE)
        return replace(self, crash_in=self.crash_in - 1)

    def __str__(self) -> str:
        said = {
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
        names = [f"{name}={value:g}" for name, value in said.items() if value is not None]
        return ",".join([*names, *(name for name, on in flags.items() if on)]) or "none"


def injected(what: str, kind: ErrorKind = ErrorKind.INTERNAL) -> SluiceError:
    """The error of a fault; another worker may do better."""
    return SluiceError(kind, f"A fault was injected: {what}.", code="injected_fault", retryable=True)


def _number(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1e9:
        raise invalid(f"Fault {name} needs a number of at least {least:g}, as in {name}=5.", param="fault")
    return value
