"""A sentence excuses the errors that it is about, and no others."""

from __future__ import annotations

import pytest

from tests.support.faults.injections import FAULTS
from tests.support.faults.leftovers import Left
from tests.support.faults.loads import LOADS
from tests.support.faults.outcome import Cell
from tests.support.faults.parts import PARTS
from tests.support.faults.sentences import LEFT_SENTENCES, SENTENCES, excuse, excuse_left

LOST = "request 1, -0.5 s: RequestFailedError: the reservation was lost: matrix-1 on worker-0"


def cell(part: str = "worker", fault: str = "sigkill", load: str = "route", *errors: str, retried: int = 0) -> Cell:
    return Cell(part, fault, load, requests=9, failed=len(errors), errors=list(errors), retried=retried)


def test_excuse_of_a_perfect_cell_is_empty() -> None:
    assert excuse(cell()) == ""


def test_excuse_of_a_reservation_that_ends_with_its_worker_is_its_sentence() -> None:
    assert "ends with the worker" in excuse(cell("worker", "sigkill", "route", LOST))


def test_excuse_of_a_reservation_that_flushall_deleted_is_its_sentence_and_of_a_later_one_none() -> None:
    assert "FLUSHALL" in excuse(cell("redis", "flushall", "route", LOST))
    assert excuse(cell("redis", "flushall", "route", LOST.replace("-0.5 s", "+1.5 s"))) == ""


@pytest.mark.parametrize(
    "red",
    [
        cell("router", "sigkill", "route", LOST),
        cell("worker", "ten-times-slower", "route", LOST),
        cell("worker", "sigkill", "chat", LOST),
        cell("worker", "sigkill", "route", LOST, "request 2, +1.0 s: hung: no end within 45 s"),
    ],
)
def test_excuse_of_anything_else_is_empty(red: Cell) -> None:
    assert excuse(red) == ""


def test_excuse_does_not_cover_service_that_does_not_return() -> None:
    red = cell("worker", "sigkill", "route", LOST)
    red.full_service_s = None
    assert excuse(red) == ""


def test_excuse_of_clients_that_asked_the_other_gateway_is_its_sentence() -> None:
    assert "other gateway" in excuse(cell("gateway", "sigkill", "chat", retried=3))
    assert excuse(cell("gateway", "sigkill", "chat", "request 0, +1.0 s: 502", retried=3)) == ""


KEPT = Left(keys={"{sluice:responses}:sizes": 1, "{sluice:batches}:usage": 1})


def test_excuse_of_what_a_stopped_gateway_stored_late_is_its_sentence() -> None:
    assert "is left" in excuse_left("gateway", "sigstop-60s", KEPT)


@pytest.mark.parametrize(
    ("part", "fault", "left"),
    [
        ("gateway", "sigstop-60s", Left()),
        ("gateway", "sigkill", KEPT),
        ("router", "sigstop-60s", KEPT),
        ("gateway", "sigstop-60s", Left(keys={**(KEPT.keys or {}), "{sluice:tiny}:claim:*": 1})),
        ("gateway", "sigstop-60s", Left(keys=KEPT.keys, reservations=1)),
    ],
)
def test_excuse_of_anything_else_that_is_left_is_empty(part: str, fault: str, left: Left) -> None:
    assert excuse_left(part, fault, left) == ""


def test_sentences_name_known_parts_faults_and_loads() -> None:
    for sentence in (*SENTENCES, *LEFT_SENTENCES):
        assert set(sentence.parts) <= PARTS.keys()
        assert set(sentence.faults) <= FAULTS.keys()
        assert set(sentence.loads) <= LOADS.keys()
