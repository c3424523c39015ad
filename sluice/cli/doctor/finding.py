"""What an examination finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How something is; only FAIL makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One thing looked at; `advice` is empty when nothing is to be done."""

    check: str
    state: State
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, State.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, State.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, State.FAIL, found, advice)


def skipped(check: str, advice: str) -> Finding:
    return Finding(check, State.SKIPPED, "not looked at", advice)


CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0


def clock(check: str, ahead_s: float) -> Finding:
    """A clock that is `ahead_s` seconds before this machine's."""
    apart = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    advice = "Synchronise the clocks (NTP): leases, certificates and traces rely on them."
    if abs(ahead_s) >= CLOCK_FAIL_S:
        return fail(check, apart, advice)
    return warn(check, apart, advice) if abs(ahead_s) >= CLOCK_WARN_S else ok(check, f"within {CLOCK_WARN_S:g} s")
