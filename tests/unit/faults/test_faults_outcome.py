"""The arithmetic of a cell: what was lost or doubled, and when service was full again."""

from __future__ import annotations

import pytest

from tests.support.faults.outcome import (
    Answer,
    Cell,
    Observation,
    Reference,
    full_service,
    judged,
    lost_and_doubled,
)

TOLD = Answer(("the river runs past the gate", "stop"), 7)
REFERENCE = Reference({0: TOLD}, {0: 1.0})
INJECTED = 100.0


def seen(began: float, seconds: float = 1.0, answer: Answer | None = TOLD, **more: float) -> Observation:
    error = "" if answer else "gone"
    return Observation("chat", 0, INJECTED + began, INJECTED + began + seconds, answer, error, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (TOLD, (0, 0)),
        (Answer(("the river runs past the gate", "stop"), 5), (2, 0)),
        (Answer(("the river runs past the gate", "stop"), 9), (0, 2)),
        (Answer(("the river past the gate", "stop"), 7), (1, 0)),
        (Answer(("the river runs runs runs past the gate", "stop"), 7), (0, 2)),
        (Answer(("the boat runs past the gate", "stop"), 7), (1, 1)),
        (Answer(("the river runs past the gate", "length"), 7), (1, 1)),
    ],
)
def test_tokens_of_an_answer_are_counted_as_lost_or_doubled(found: Answer, expected: tuple[int, int]) -> None:
    assert lost_and_doubled(TOLD, found) == expected


def test_full_service_without_a_failure_is_immediate() -> None:
    assert full_service([seen(-1), seen(0.5), seen(2)], INJECTED, REFERENCE) == 0.0


def test_full_service_begins_with_the_first_request_after_the_last_failure() -> None:
    requests = [seen(1), seen(2, answer=None), seen(3), seen(4, answer=None), seen(6.5), seen(7)]
    assert full_service(requests, INJECTED, REFERENCE) == pytest.approx(6.5)


def test_full_service_does_not_count_requests_from_before_the_fault() -> None:
    assert full_service([seen(-1, 30, answer=None), seen(1)], INJECTED, REFERENCE) == 0.0


def test_full_service_counts_slow_requests_as_failures() -> None:
    assert full_service([seen(1, 3.5), seen(5, 2.9)], INJECTED, REFERENCE) == pytest.approx(5)


@pytest.mark.parametrize("requests", [[], [seen(-2)], [seen(1), seen(2, answer=None)], [seen(1, 9.0)]])
def test_full_service_without_a_good_request_at_the_end_is_not_reached(requests: list[Observation]) -> None:
    assert full_service(requests, INJECTED, REFERENCE) is None


def test_judged_cell_counts_what_clients_noticed() -> None:
    other = Answer(("the river runs", "stop"), 4)
    requests = [
        seen(-1, pause_s=0.5),
        seen(1, pause_s=2.5, retried=1),
        seen(2, answer=None),
        seen(3, answer=other),
        seen(4),
    ]
    cell = judged(Cell("router", "sigkill", "chat"), requests, REFERENCE, INJECTED)
    assert (cell.requests, cell.failed, cell.different, cell.lost, cell.doubled) == (5, 1, 1, 3, 0)
    assert (cell.retried, cell.pause_s, cell.full_service_s) == (1, 2.5, 3.0)
    assert len(cell.errors) == 2
    assert not cell.perfect


def test_judged_cell_without_requests_is_not_perfect() -> None:
    cell = judged(Cell("router", "sigkill", "chat"), [], REFERENCE, INJECTED)
    assert not cell.perfect
