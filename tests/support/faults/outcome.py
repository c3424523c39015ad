"""What a fault did to requests: failures, differences, tokens lost or doubled, pauses, and the time to full service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

NORMAL_TIMES, NORMAL_EXTRA_S = 2.0, 1.0
"""A request is served normally within so many times its undisturbed duration, and so many seconds more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client can tell apart.

    Attributes:
        parts: everything said, by kind: text, reasoning, tool calls, why it ended; of a batch each line.
        tokens: generated, by the usage in the answer; -1: it says none.
    """

    parts: tuple[str, ...]
    tokens: int = -1


@dataclass(slots=True)
class Observation:
    """One request of a load.

    Attributes:
        number: which of the load's distinct requests it was.
        began: monotonic time, as `ended`.
        answer: None when it failed.
        error: why it failed.
        pause_s: longest wait for the next event, the first one included; of an answer in one piece, its duration.
        retried: attempts that were cut with their server and repeated at another one.
    """

    load: str
    number: int
    began: float
    ended: float = 0.0
    answer: Answer | None = None
    error: str = ""
    pause_s: float = 0.0
    retried: int = 0

    @property
    def seconds(self) -> float:
        """How long the request took."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Reference:
    """The undisturbed run of one load.

    Attributes:
        answers: by number of the request.
        seconds: how long each took.
    """

    answers: Mapping[int, Answer]
    seconds: Mapping[int, float]

    def is_normal(self, seen: Observation) -> bool:
        """Whether a request was served, and in normal time."""
        return seen.answer is not None and self.is_in_time(seen)

    def is_in_time(self, seen: Observation) -> bool:
        """Whether a request took no longer than is normal."""
        return seen.seconds <= NORMAL_TIMES * self.seconds[seen.number] + NORMAL_EXTRA_S


@dataclass(slots=True)
class Cell:
    """A part, a fault and a load.

    Attributes:
        lost, doubled: tokens, by the usage; words, where only the text tells.
        pause_s: longest of all requests.
        full_service_s: None: not reached.
        errors: some of them.
        not_run: why the cell could not run; empty: it ran.
    """

    part: str
    fault: str
    load: str
    requests: int = 0
    failed: int = 0
    different: int = 0
    lost: int = 0
    doubled: int = 0
    retried: int = 0
    pause_s: float = 0.0
    full_service_s: float | None = 0.0
    errors: list[str] = field(default_factory=list)
    sentence: str = ""
    not_run: str = ""

    @property
    def perfect(self) -> bool:
        """Whether no client noticed more than a pause."""
        served = self.requests > 0 and self.full_service_s is not None
        return served and not (self.failed or self.different or self.lost or self.doubled)


def moved_words(expected: Answer, found: Answer) -> tuple[int, int]:
    """Returns the words that an answer lacks and those that it has too many."""
    lost = doubled = 0
    before, after = " ".join(expected.parts).split(), " ".join(found.parts).split()
    for kind, start, end, other_start, other_end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            lost += end - start
            doubled += other_end - other_start
    return lost, doubled


def lost_and_doubled(expected: Answer, found: Answer) -> tuple[int, int]:
    """Returns the tokens that an answer lacks and those that it has too many; words where the usage is as expected."""
    if found.tokens != expected.tokens:
        return max(0, expected.tokens - found.tokens), max(0, found.tokens - expected.tokens)
    return (0, 0) if found == expected else moved_words(expected, found)


def full_service(observations: Sequence[Observation], injected: float, reference: Reference) -> float | None:
    """Returns the seconds from a fault until requests that start from then on are served normally.

    None: no request has started after the last one that failed or was slow.
    """
    started = sorted((seen for seen in observations if seen.began >= injected), key=lambda seen: seen.began)
    whole_since = injected
    pending = False
    for seen in started:
        if not reference.is_normal(seen):
            pending = True
        elif pending:
            whole_since, pending = seen.began, False
    return None if pending or not started else whole_since - injected


def judged(cell: Cell, observations: Sequence[Observation], reference: Reference, injected: float) -> Cell:
    """Fills a cell with what happened to the requests of its load."""
    cell.requests = len(observations)
    cell.full_service_s = full_service(observations, injected, reference)
    for seen in observations:
        cell.retried += seen.retried
        cell.pause_s = max(cell.pause_s, seen.pause_s)
        if seen.answer is None:
            cell.failed += 1
            cell.errors.append(f"request {seen.number}, {seen.began - injected:+.1f} s: {seen.error}")
        elif seen.answer != (expected := reference.answers[seen.number]):
            cell.different += 1
            lost, doubled = lost_and_doubled(expected, seen.answer)
            cell.lost += lost
            cell.doubled += doubled
            cell.errors.append(f"request {seen.number}, {seen.began - injected:+.1f} s: {seen.answer} not {expected}")
    return cell
