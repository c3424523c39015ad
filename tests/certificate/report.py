"""Writes the results of a run: a summary for the terminal, and the tables of docs/certificate.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.certificate.comparison import Comparison
from tests.certificate.plan import ANSWERS, AnswerCase
from tests.certificate.reasons import REASONS
from tests.certificate.tally import Counts, Tally

CONTEXT = 50


@dataclass(frozen=True)
class Facts:
    """Of a run: cases, seconds, versions of the engines, templates."""

    cases: int
    seconds: float
    versions: tuple[str, ...]
    templates: int


def summary(tally: Tally, facts: Facts, stale: Sequence[str], examples: int) -> str:
    """Returns what a terminal shows."""
    lines = [f"{facts.cases:,} conversations, {facts.seconds:.0f} s, {', '.join(facts.versions)}"]
    for engine in sorted({engine for engine, *_ in tally.cells}):
        total = tally.total(engine)
        lines.append(
            f"{engine}: {total.equal:,} equal, {total.different:,} different ({total.unexplained:,} without a reason), "
            f"{total.refused:,} refused by both"
        )
    lines += [f"{count:>7,}  {name}" for name, count in tally.reasons.most_common()]
    lines += [f"no difference has the reason: {name}" for name in stale]
    lines += [f"LOST {sorted(found.lost)}: {_shown(found)}" for found in tally.lost[:examples]]
    for kind, found in sorted(tally.unexplained.items(), key=lambda item: -len(item[1])):
        subjects = Counter(comparison.case.cell.subject for comparison in found)
        lines.append(f"{len(found):>6} {' | '.join(kind)}: {', '.join(subjects)}")
        lines += [f"         {_shown(comparison)}" for comparison in found[:examples]]
    lines.append(
        f"{tally.unexplained_count} without a reason, {len(tally.lost)} with lost text, {len(stale)} stale reasons"
    )
    return "\n".join(lines)


def _shown(comparison: Comparison) -> str:
    """A comparison from the first difference on."""
    case, ours, theirs = comparison.case, comparison.ours, comparison.theirs
    at = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
    )
    start = max(0, at - CONTEXT)
    what = repr(case.answer.text) if isinstance(case, AnswerCase) else f"#{case.conversation.number}"
    return f"{case.cell.subject} {what}: …{ours[start:at]!r} + {ours[at : at + 200]!r} / {theirs[at : at + 200]!r}"


def document(tally: Tally, facts: Facts) -> str:
    """Returns the tables, in Markdown."""
    engines = sorted({engine for engine, *_ in tally.cells})
    totals = {engine: tally.total(engine) for engine in engines}
    lines = [
        f"{facts.cases:,} conversations and answers, {facts.templates} templates, {facts.seconds / 60:.0f} minutes on "
        f"two CPU "
        f"cores; {', '.join(facts.versions)}.",
        "",
        *_table(
            ("engine", "equal", "different, with a reason", "without a reason", "refused by both"),
            ((engine, t.equal, t.different - t.unexplained, t.unexplained, t.refused) for engine, t in totals.items()),
        ),
        "",
        "### Reasons",
        "",
        *_table(
            ("cases", "difference", "right", "checked"),
            (
                (tally.reasons[reason.name], reason.text, reason.right, reason.proof)
                for reason in REASONS
                if tally.reasons[reason.name]
            ),
        ),
    ]
    for title, column, answers in (("Templates", 1, False), ("Parsers", 1, True), ("APIs and features", 0, False)):
        lines += ["", f"### {title}", "", *_by(tally, engines, column, answers)]
    return "\n".join(lines) + "\n"


def _by(tally: Tally, engines: Sequence[str], column: int, answers: bool) -> list[str]:
    """The counts by subject, or with column 0 by API and feature: equal / different / refused."""
    rows: dict[str, dict[str, Counts]] = defaultdict(lambda: defaultdict(Counts))
    for (engine, subject, api, feature), counts in tally.cells.items():
        if (api == ANSWERS) != answers:
            continue
        total = rows[subject if column else f"{api}, {feature}"][engine]
        total.equal += counts.equal
        total.different += counts.different
        total.refused += counts.refused
    shown = [engine for engine in engines if any(engine in row for row in rows.values())]
    return _table(
        ("", *shown),
        (
            (name, *(f"{row[e].equal} / {row[e].different} / {row[e].refused}" if e in row else "–" for e in shown))
            for name, row in rows.items()
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in row)} |" for row in rows),
    ]
