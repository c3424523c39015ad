"""Rules, what becomes of them, and the register that holds them all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.conformance.subject import Subject

Check = Callable[["Subject"], Awaitable[str]]


class Broken(Exception):
    """The worker does not keep the clause; the text says what was seen instead."""


class NotClaimed(Exception):
    """The card does not claim what the rule is about; the text says how the worker refuses it."""


class NotChecked(Exception):
    """The rule could not be tried here; the text says why, and what to do where something can be done."""


class Verdict(StrEnum):
    """What became of a rule."""

    PASSED = "pass"
    FAILED = "fail"
    NOT_CLAIMED = "not claimed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Rule:
    """One clause of the contract and how it is tried.

    Attributes:
        name: stable, for reports and `--rule`.
        proves: the clause in one sentence.
        clause: where the contract says so.
        check: returns what was seen; raises Broken, NotClaimed or NotChecked.
        generates: sends whole requests, which a worker that plays only one part of them does not take.
        disturbs: ends the worker, so it comes after all others.
    """

    name: str
    proves: str
    clause: str
    check: Check
    generates: bool = True
    disturbs: bool = False

    @property
    def part(self) -> str:
        """The part of the contract it belongs to: the name of its module."""
        return self.check.__module__.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Result:
    """One rule's outcome; `seen` is a sentence, `seconds` how long it took."""

    rule: Rule
    verdict: Verdict
    seen: str
    seconds: float


@dataclass(slots=True)
class Report:
    """What a run found, rule by rule."""

    address: str
    worker: str = ""
    results: list[Result] = field(default_factory=list)

    def with_verdict(self, verdict: Verdict) -> list[str]:
        """Names of the rules that ended so."""
        return [result.rule.name for result in self.results if result.verdict is verdict]

    @property
    def failed(self) -> list[str]:
        """Names of the rules that the worker does not keep."""
        return self.with_verdict(Verdict.FAILED)


_RULES: list[Rule] = []


def rule(
    name: str, proves: str, clause: str, *, generates: bool = True, disturbs: bool = False
) -> Callable[[Check], Check]:
    """Registers a check under a name; see Rule."""

    def register(check: Check) -> Check:
        _RULES.append(Rule(name, proves, clause, check, generates, disturbs))
        return check

    return register


def registered() -> Sequence[Rule]:
    """Every rule whose module was imported, in the order of registration."""
    return tuple(_RULES)


def expect(kept: bool, otherwise: str) -> None:
    """Raises Broken with a sentence that says what was seen, unless the clause was kept."""
    if not kept:
        raise Broken(otherwise)
