"""The load book: idempotent, expiring, and back to zero."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.state.reservations.cost import NO_LOAD, Load, Offer
from services.router.state.reservations.table import ReservationParams, ReservationTable
from services.router.state.workers.worker import WorkerRank
from tests.support.fakes.clock import Clock

A, B = WorkerRank("a", 0), WorkerRank("b", 0)


class MillisecondClock(Clock):
    def __call__(self) -> int:
        return int(self.now)


def offer(slot: WorkerRank, blocks: int = 10) -> Offer:
    return Offer(slot, blocks, blocks, 0, blocks * 1000, blocks * 1000)


def test_booked_load_sends_the_next_request_elsewhere() -> None:
    book = ReservationTable(MillisecondClock(), Random(1))
    first = book.select([offer(A), offer(B)], ReservationParams("r1", 1000))
    second = book.select([offer(A), offer(B)], ReservationParams("r2", 1000))
    assert {first.slot, second.slot} == {A, B}


def test_the_same_request_id_gets_the_same_reservation() -> None:
    book = ReservationTable(MillisecondClock(), Random(1))
    first = book.select([offer(A)], ReservationParams("r1", 1000))
    again = book.select([offer(B)], ReservationParams("r1", 1000))
    assert (again.slot, again.expires_unix_ms, again.repeated) == (first.slot, first.expires_unix_ms, True)
    assert book.load(A) == Load(10, 10, 1)


def test_a_reservation_outside_the_allowed_workers_is_given_up() -> None:
    book = ReservationTable(MillisecondClock(), Random(1))
    book.select([offer(A)], ReservationParams("r1", 1000))
    moved = book.select([offer(B)], ReservationParams("r1", 1000, allowed=frozenset({"b"})))
    assert moved.slot == B
    assert book.load(A) == NO_LOAD


def test_without_a_request_id_nothing_is_booked() -> None:
    book = ReservationTable(MillisecondClock(), Random(1))
    assert book.select([offer(A)], ReservationParams("", 1000)).expires_unix_ms == 0
    assert book.loads == {}


def test_marking_gives_prefill_back_once_and_freeing_the_rest() -> None:
    book = ReservationTable(MillisecondClock(), Random(1))
    book.select([offer(A)], ReservationParams("r1", 1000))
    assert book.mark_prefill_complete(["r1", "x"]) == ["x"]
    assert book.mark_prefill_complete(["r1"]) == []
    assert book.load(A) == Load(0, 10, 1)
    assert book.free(["r1", "r1"]) == ["r1"]
    assert book.loads == {}


def test_reservations_expire() -> None:
    clock = MillisecondClock()
    book = ReservationTable(clock, Random(1))
    book.select([offer(A)], ReservationParams("r1", 1000))
    clock.now += 999
    assert book.expire() == 0
    clock.now += 1
    assert book.expire() == 1
    assert book.loads == {}
    assert book.free(["r1"]) == ["r1"]


def test_a_worker_that_is_gone_takes_its_reservations_along() -> None:
    book = ReservationTable(MillisecondClock(), Random(1))
    book.select([offer(A)], ReservationParams("r1", 1000))
    book.select([offer(B)], ReservationParams("r2", 1000))
    book.drop_worker("a")
    assert list(book.loads) == [B]


def test_expiries_of_freed_requests_do_not_pile_up() -> None:
    book = ReservationTable(MillisecondClock(), Random(1))
    for number in range(10_000):
        book.select([offer(A)], ReservationParams(f"r{number}", 600_000))
        book.free([f"r{number}"])
    assert len(book._expiries) < 200


class BookMachine(RuleBasedStateMachine):
    """Whatever happens, the loads are the sum of the reservations."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = MillisecondClock()
        self.book = ReservationTable(self.clock, Random(1))

    @rule(request=st.integers(0, 8), blocks=st.integers(0, 50), ttl=st.integers(1, 100))
    def select(self, request: int, blocks: int, ttl: int) -> None:
        self.book.select([offer(A, blocks), offer(B, blocks)], ReservationParams(f"r{request}", ttl))

    @rule(request=st.integers(0, 8))
    def mark(self, request: int) -> None:
        self.book.mark_prefill_complete([f"r{request}"])

    @rule(request=st.integers(0, 8))
    def free(self, request: int) -> None:
        self.book.free([f"r{request}"])

    @rule(ms=st.integers(1, 60))
    def wait(self, ms: int) -> None:
        self.clock.now += ms
        self.book.expire()

    @rule(worker=st.sampled_from(["a", "b"]))
    def drop(self, worker: str) -> None:
        self.book.drop_worker(worker)

    @invariant()
    def loads_are_sums(self) -> None:
        for slot in (A, B):
            mine = [each for each in self.book.reservations if each.slot == slot]
            expected = Load(
                sum(each.prefill for each in mine) / 1000, sum(each.decode for each in mine) / 1000, len(mine)
            )
            assert self.book.load(slot) == expected


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
