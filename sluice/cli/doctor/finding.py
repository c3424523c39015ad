"""The finding of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FindingState(StrEnum):
    """State of a finding; only FAIL leads to exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """Result of one check; `advice` is empty if no action is needed."""

    check: str
    state: FindingState
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, FindingState.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, FindingState.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, FindingState.FAIL, found, advice)


def skipped(check: str, advice: str) -> Finding:
    return Finding(check, FindingState.SKIPPED, "skipped", advice)


CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0


def clock(check: str, ahead_s: float) -> Finding:
    """Rates a clock that is `ahead_s` seconds ahead of this machine's."""
    difference = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    advice = "Synchronise the clocks (NTP): leases, certificates and traces depend on them."
    if abs(ahead_s) >= CLOCK_FAIL_S:
        return fail(check, difference, advice)
    return warn(check, difference, advice) if abs(ahead_s) >= CLOCK_WARN_S else ok(check, f"within {CLOCK_WARN_S:g} s")
