"""Compares the results of two sides, and finds what is lost of a conversation's text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.certificate.conversations import words_in
from tests.certificate.plan import Case, PromptCase
from tests.certificate.sides.side import Result

ANSWER_FIELDS = ("content", "reasoning", "calls", "finish", "reasoning_tokens")


class Verdict(Enum):
    """What the results of a case come to."""

    EQUAL = "equal"
    BOTH_REFUSE = "both refuse"
    THEY_REFUSE = "only the engine refuses"
    DIFFERENT = "different"
    WE_REFUSE = "only Sluice refuses"


@dataclass(frozen=True)
class Comparison:
    """Sluice's result of a case beside an engine's.

    Attributes:
        fields: what differs.
        lost: words of the conversation that the engine's prompt shows and Sluice's does not.
        dropped: words of the conversation that Sluice's prompt shows and the engine's does not.
        missing: words of the conversation, but for thoughts, that Sluice's prompt does not show.
        ours, theirs: the texts, or the fields that differ, for a person.
        their_ids: the engine's prompt.
        degraded: what Sluice says that its answer lacks.
        answers: both readings of an answer.
    """

    case: Case
    engine: str
    verdict: Verdict
    fields: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()
    ours: str = ""
    theirs: str = ""
    their_ids: tuple[int, ...] = ()
    degraded: tuple[str, ...] = ()
    answers: tuple[Result, Result] | None = None
    dropped: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


def compare(
    case: Case, engine: str, ours: Result, theirs: Result, text_of: Callable[[list[int]], str]
) -> Comparison | None:
    """Compares the results of a case; None for what the engine has not."""
    if "absent" in theirs:
        return None
    degraded = tuple(ours.get("degraded", ()))
    if "refused" in ours or "refused" in theirs:
        verdict = Verdict.BOTH_REFUSE
        if "refused" not in theirs:
            verdict = Verdict.WE_REFUSE
        elif "refused" not in ours:
            verdict = Verdict.THEY_REFUSE
        ids = tuple(theirs.get("ids", ()))
        refusals = ours.get("refused", ""), theirs.get("refused", "")
        shown = words_in(text_of(ours["ids"])) if "ids" in ours else set()
        missing = (
            case.conversation.words - case.conversation.thoughts - shown
            if isinstance(case, PromptCase)
            else frozenset()
        )
        return Comparison(case, engine, verdict, (), frozenset(), *refusals, ids, degraded, missing=missing)
    compare_fields = _prompt if isinstance(case, PromptCase) else _answer
    return compare_fields(case, engine, ours, theirs, text_of, degraded)


def _prompt(
    case: Case,
    engine: str,
    ours: Result,
    theirs: Result,
    text_of: Callable[[list[int]], str],
    degraded: tuple[str, ...],
) -> Comparison:
    fields = []
    if ours["ids"] != theirs["ids"]:
        fields.append("ids")
    if "schema" in theirs and _json(ours.get("schema")) != _json(theirs["schema"]):
        fields.append("schema")
    if not fields:
        return Comparison(case, engine, Verdict.EQUAL, degraded=degraded)
    texts = text_of(ours["ids"]), text_of(theirs["ids"])
    assert isinstance(case, PromptCase)
    words, (mine, other) = case.conversation.words, map(words_in, texts)
    if fields == ["schema"]:
        texts = json.dumps(ours.get("schema")), json.dumps(theirs["schema"])
    return Comparison(
        case,
        engine,
        Verdict.DIFFERENT,
        tuple(fields),
        words & other - mine,
        *texts,
        tuple(theirs["ids"]),
        degraded,
        dropped=words & mine - other,
        missing=words - case.conversation.thoughts - mine,
    )


def _answer(
    case: Case,
    engine: str,
    ours: Result,
    theirs: Result,
    text_of: Callable[[list[int]], str],
    degraded: tuple[str, ...],
) -> Comparison:
    mine, other = _normal(ours), _normal(theirs)
    fields = tuple(name for name in ANSWER_FIELDS if name in other and mine[name] != other[name])
    # vLLM does not count a token that ends within a character; with tokens of bytes there are many.
    if fields and not mine["reasoning"].isascii():
        fields = tuple(name for name in fields if name != "reasoning_tokens")
    if not fields:
        return Comparison(case, engine, Verdict.EQUAL, degraded=degraded)
    left, right = (json.dumps({name: side[name] for name in fields}, ensure_ascii=False) for side in (mine, other))
    return Comparison(
        case, engine, Verdict.DIFFERENT, fields, frozenset(), left, right, degraded=degraded, answers=(mine, other)
    )


def _normal(result: Result) -> dict[str, Any]:
    """A result with calls as pairs of name and value: white space within JSON means nothing."""
    calls = [(name, _value(text)) for name, text in result["calls"].values()]
    return {**result, "calls": [list(call) for call in calls]}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
