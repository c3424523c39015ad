"""Rules, their results, and the registry of all rules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.conformance.exceptions import RuleFailed
from sluice.conformance.subject import Subject

Check = Callable[[Subject], Awaitable[str]]


class Verdict(StrEnum):
    """The outcome of a rule."""

    PASSED = "pass"
    FAILED = "fail"
    NOT_CLAIMED = "not claimed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Rule:
    """One clause of the contract and its check.

    Attributes:
        name: stable name for reports and `--rule`.
        proves: the clause in one sentence.
        clause: where the contract defines it.
        check: returns a description of the observed behaviour; raises RuleFailed, NotClaimed or NotChecked.
        generates: whether the check sends complete requests, which a worker with a prefill or decode role refuses.
        disturbs: whether the check stops the worker and must therefore run last.
    """

    name: str
    proves: str
    clause: str
    check: Check
    generates: bool = True
    disturbs: bool = False

    @property
    def part(self) -> str:
        """The part of the contract that the rule belongs to: the name of its module."""
        return self.check.__module__.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one rule; `seen` describes the observed behaviour, `seconds` is the duration."""

    rule: Rule
    verdict: Verdict
    seen: str
    seconds: float


@dataclass(slots=True)
class Report:
    """The results of a run."""

    address: str
    worker: str = ""
    results: list[Result] = field(default_factory=list)

    def with_verdict(self, verdict: Verdict) -> list[str]:
        """Returns the names of the rules with this verdict."""
        return [result.rule.name for result in self.results if result.verdict is verdict]

    @property
    def failed(self) -> list[str]:
        """Names of the failed rules."""
        return self.with_verdict(Verdict.FAILED)


_RULES: list[Rule] = []


def rule(
    name: str, proves: str, clause: str, *, generates: bool = True, disturbs: bool = False
) -> Callable[[Check], Check]:
    """Registers the decorated check as a rule; see Rule for the arguments."""

    def register(check: Check) -> Check:
        _RULES.append(Rule(name, proves, clause, check, generates, disturbs))
        return check

    return register


def registered() -> Sequence[Rule]:
    """Returns all rules of imported modules, in the order of registration."""
    return tuple(_RULES)


def expect(condition: bool, message: str) -> None:
    """Raises RuleFailed with `message` unless the condition holds."""
    if not condition:
        raise RuleFailed(message)
