"""Injects faults of real engines for tests.

crash=STEPS        exits like kill -9 after a number of engine steps; 0 or no value: at the next step
hang               stops stepping; requests wait
error_after=TOKENS fails every request after a number of tokens
poison=ID          exits like kill -9 when it runs a request whose prompt begins with this token id
refuse             rejects requests as if the engine had exited
none               removes all faults
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from services.common.base.errors import ErrorKind, SluiceError, invalid

CRASH_CODE = 137
_NAMES = ("crash", "hang", "error_after", "poison", "refuse")


@dataclass(frozen=True, slots=True)
class Faults:
    """The active faults. `crash_in` counts steps (None: no crash); `error_after` counts tokens (0: no error)."""

    crash_in: int | None = None
    hang: bool = False
    error_after: int = 0
    refuse: bool = False
    poison: int | None = None
    die: Callable[[int], object] = field(default=os._exit, compare=False)

    def with_fault(self, text: str) -> Faults:
        """Returns these faults with NAME or NAME=VALUE added; raises SluiceError(INVALID_ARGUMENT) if unknown."""
        name, _, value = text.strip().partition("=")
        match name:
            case "none":
                return Faults(die=self.die)
            case "crash":
                return replace(self, crash_in=_number(name, value or "0", minimum=0))
            case "hang":
                return replace(self, hang=True)
            case "poison":
                return replace(self, poison=_number(name, value, minimum=0))
            case "refuse":
                return replace(self, refuse=True)
            case "error_after":
                return replace(self, error_after=_number(name, value, minimum=1))
        raise invalid(f"Fault {name!r} is unknown; choose from {', '.join((*_NAMES, 'none'))}.", param="fault")

    def with_all(self, texts: Iterable[str]) -> Faults:
        """Returns these faults with several added, in order."""
        faults = self
        for text in texts:
            faults = faults.with_fault(text)
        return faults

    def after_arrival(self, token_ids: Sequence[int]) -> Faults:
        """Returns the faults after the arrival of a prompt: the next step crashes if it begins with `poison`."""
        return replace(self, crash_in=0) if self.poison is not None and token_ids[0] == self.poison else self

    def after_step(self) -> Faults:
        """Counts a step towards a crash; does not return when it crashes."""
        if self.crash_in is None:
            return self
        if self.crash_in <= 0:
            self.die(CRASH_CODE)
        return replace(self, crash_in=self.crash_in - 1)

    def __str__(self) -> str:
        values = {"crash": self.crash_in, "error_after": self.error_after or None, "poison": self.poison}
        flags = {"hang": self.hang, "refuse": self.refuse}
        names = [f"{name}={value}" for name, value in values.items() if value is not None]
        return ",".join([*names, *(name for name, is_set in flags.items() if is_set)]) or "none"


def injected(what: str, kind: ErrorKind = ErrorKind.INTERNAL) -> SluiceError:
    """Returns the error of an injected fault; retryable on another worker."""
    return SluiceError(kind, f"A fault was injected: {what}.", code="injected_fault", retryable=True)


def _number(name: str, text: str, minimum: int) -> int:
    if not (text.isdecimal() and minimum <= int(text[:10]) < 10**9):
        raise invalid(f"Fault {name} requires a number of at least {minimum}, as in {name}=5.", param="fault")
    return int(text)
