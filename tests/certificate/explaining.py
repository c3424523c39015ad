"""Finds the reasons of a difference among those that are known."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.preprocess.contract.tokenizer import ChatRequest
from tests.certificate.bodies import Body
from tests.certificate.comparison import Comparison, Verdict
from tests.certificate.plan import PromptCase
from tests.certificate.sides.side import Result

Change = Callable[[ChatRequest], ChatRequest]
BodyChange = Callable[[Body], Body]
Rendered = Callable[[PromptCase, Iterable[Change], Iterable[BodyChange]], list[int] | None]
DIFFERENT = (Verdict.DIFFERENT, Verdict.WE_REFUSE)
ALL = ("*",)


@dataclass(frozen=True)
class Reason:
    """Why an engine's result is another, and who is right.

    It explains a difference in one of these ways: Sluice's prompt equals the engine's after `change` of the chat or
    `body_change` of the client's body, which do what the engine does; both readings of an answer are equal in their
    `normal` form; `says` is in the refusal; or `holds` is true of the comparison.

    Attributes:
        name: short, unique.
        text: what the engine does, and what Sluice does.
        right: "Sluice", the engine, or "either".
        engine: of the comparison.
        apis, features, subjects: patterns of those it may explain; a subject is a template or a format.
        verdict: that `says` and `holds` are about.
    """

    name: str
    text: str
    right: str
    engine: str
    apis: tuple[str, ...] = ("chat", "responses", "messages")
    features: tuple[str, ...] = ALL
    subjects: tuple[str, ...] = ALL
    change: Change | None = None
    body_change: BodyChange | None = None
    normal: Callable[[Result], Result] | None = None
    says: str = ""
    verdict: Verdict = Verdict.DIFFERENT
    holds: Callable[[Comparison], bool] | None = None

    def concerns(self, comparison: Comparison) -> bool:
        """Returns whether this may be a reason of the comparison."""
        cell = comparison.case.cell
        return comparison.engine == self.engine and all(
            any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)
            for value, patterns in (
                (cell.api, self.apis),
                (cell.feature, self.features),
                (cell.subject, self.subjects),
            )
        )

    def is_true_of(self, comparison: Comparison) -> bool:
        """Returns whether `holds` is true of a comparison of its verdict."""
        return self.holds is not None and comparison.verdict is self.verdict and self.holds(comparison)

    @property
    def proof(self) -> str:
        """What is checked for each difference."""
        if self.holds is not None:
            return (self.holds.__doc__ or "").split(".")[0]
        if self.says:
            return f"The refusal says `{self.says}`"
        return "Equal once both are read so" if self.normal else "Equal once Sluice does the same"

    def is_said(self, comparison: Comparison) -> bool:
        """Returns whether `says` is in the refusal."""
        refusal = comparison.ours if self.verdict is Verdict.WE_REFUSE else comparison.theirs
        return comparison.verdict is self.verdict and re.search(self.says, refusal) is not None


def explain(comparison: Comparison, reasons: Sequence[Reason], rendered: Rendered) -> list[Reason]:
    """Returns the reasons of a difference; none when it is not explained."""
    concerned = [reason for reason in reasons if reason.concerns(comparison)]
    refusing = [reason for reason in concerned if reason.says and reason.is_said(comparison)]
    if refusing:
        return refusing[:1]
    found = _proved(comparison, concerned, rendered)
    return found or [reason for reason in concerned if reason.is_true_of(comparison)][:1]


def _proved(comparison: Comparison, concerned: Sequence[Reason], rendered: Rendered) -> list[Reason]:
    """Returns the reasons with which both sides are the same."""
    if comparison.answers is not None:
        return _least([reason for reason in concerned if reason.normal], lambda chosen: _same(comparison, chosen))
    case = comparison.case
    if not isinstance(case, PromptCase) or comparison.verdict not in DIFFERENT or "schema" in comparison.fields:
        return []

    def rendered_same(chosen: Sequence[Reason]) -> bool:
        bodies = [reason.body_change for reason in chosen if reason.body_change is not None]
        ids = rendered(case, [reason.change for reason in chosen if reason.change is not None], bodies)
        return ids is not None and tuple(ids) == comparison.their_ids

    return _least([reason for reason in concerned if reason.change or reason.body_change], rendered_same)


def _same(comparison: Comparison, chosen: Sequence[Reason]) -> bool:
    assert comparison.answers is not None
    ours, theirs = comparison.answers
    for reason in chosen:
        assert reason.normal is not None
        ours, theirs = reason.normal(ours), reason.normal(theirs)
    return all(ours[name] == theirs[name] for name in comparison.fields)


def _least(candidates: Sequence[Reason], explains: Callable[[Sequence[Reason]], bool]) -> list[Reason]:
    """Returns one of the candidates that explains alone, or else as few as are needed; none when all do not."""
    for reason in candidates:
        if explains([reason]):
            return [reason]
    if not candidates or not explains(candidates):
        return []
    needed = list(candidates)
    for reason in candidates:
        rest = [other for other in needed if other is not reason]
        if explains(rest):
            needed = rest
    return needed
