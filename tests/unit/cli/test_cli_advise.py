"""`sluice advise` turns what routers answer into loads of tiers, and loads into a number and a reason."""

from __future__ import annotations

import json

import pytest

from services.common.types.scaling import TierLoad
from sluice.cli.sizing.advise import advised, why
from sluice.cli.sizing.tiers import AGGREGATED, WorkerTier, loads_of
from sluice.v1 import common_pb2, router_pb2
from tests.unit.cli.conftest import Sluice

TIER = WorkerTier("m", AGGREGATED)
LOAD = TierLoad(workers=4, max_sequences=100, max_batched_tokens=8_192, total_blocks=1_000)


def worker(
    name: str, role: common_pb2.WorkerRole.ValueType = common_pb2.WORKER_ROLE_AGGREGATED, **fields: object
) -> router_pb2.WorkerInfo:
    card = common_pb2.ModelCard(
        model="m", block_size=16, total_blocks=1_000, max_sequences=100, max_batched_tokens=8_192, data_parallel_size=2
    )
    return router_pb2.WorkerInfo(worker_id=name, role=role, card=card, **fields)  # type: ignore[arg-type]


def booked(name: str, rank: int = 0) -> router_pb2.BookedLoad:
    return router_pb2.BookedLoad(
        worker_id=name, data_parallel_rank=rank, requests=5, prefill_blocks=10, decode_blocks=30
    )


def queue(model: str, requests: int) -> router_pb2.WaitingQueue:
    return router_pb2.WaitingQueue(model=model, requests=requests)


def test_loads_of_workers_add_their_ranks_and_the_queues_of_all_routers() -> None:
    loads = loads_of([worker("a"), worker("b")], [booked("a"), booked("a", 1), booked("b")], [queue("m", 2)] * 2)
    assert loads == {TIER: TierLoad(2, 0, 15, 4, 30 * 16, 90, 200, 16_384, 2_000)}


def test_loads_of_workers_that_receive_no_requests_do_not_count() -> None:
    workers = [worker("a"), worker("b", draining=True), worker("c", set_aside="tokenizer_differs")]
    loads = loads_of(workers, [booked(name) for name in "abc"], [])
    assert (loads[TIER].workers, loads[TIER].requests) == (1, 5)


def test_loads_of_roles_are_tiers_and_each_has_the_waiting_requests() -> None:
    workers = [worker("p", common_pb2.WORKER_ROLE_PREFILL), worker("d", common_pb2.WORKER_ROLE_DECODE)]
    loads = loads_of(workers, [booked("p")], [queue("m", 3)])
    assert list(loads) == [WorkerTier("m", "decode"), WorkerTier("m", "prefill")]
    assert [load.waiting for load in loads.values()] == [3, 3]
    assert [load.requests for load in loads.values()] == [0, 5]


def test_loads_of_a_model_without_workers_are_what_waits() -> None:
    assert loads_of([], [], [queue("cold", 2)]) == {WorkerTier("cold", AGGREGATED): TierLoad(0, waiting=2)}


@pytest.mark.parametrize(
    ("changes", "bounds", "workers", "reason"),
    [
        ({"requests": 400}, (1, 0), 5, "400 requests reserved or waiting, and a worker should have 80: 5.0 workers."),
        ({"requests": 80}, (1, 0), 2, "1.0 workers, which leaves room to spare on 2."),
        ({"requests": 320}, (1, 0), 4, "4.0 workers."),
        ({"requests": 240}, (1, 0), 4, "3.0 workers, and one fewer would be filled to over 85%."),
        ({"requests": 800}, (1, 4), 4, "10.0 workers, more than are allowed."),
        ({"prefill_tokens": 98_304.0}, (1, 0), 6, "98,304 prompt tokens to compute"),
        ({"decode_blocks": 4_000.0}, (1, 0), 5, "4,000 KV blocks reserved"),
        ({"requests": 40, "waiting": 25}, (1, 0), 7, "the workers are full with 10 each"),
    ],
)
def test_advised_number_has_its_reason(
    changes: dict[str, float], bounds: tuple[int, int], workers: int, reason: str
) -> None:
    values = {name: getattr(LOAD, name) for name in TierLoad.__slots__} | changes
    (given,) = advised([{TIER: TierLoad(**values)}], *bounds)
    assert given.advice.workers == workers
    assert reason in why(given)
    document = given.as_json()
    assert (document["model"], document["role"], document["advised"]) == ("m", AGGREGATED, workers)
    json.dumps(document)


def test_advised_model_without_workers_gets_the_first_one() -> None:
    (given,) = advised([{TIER: TierLoad(0, waiting=2)}], 0, 0)
    assert (given.advice.workers, why(given)) == (1, "2 requests wait and no worker exists.")


def test_advised_workers_without_capacity_stay() -> None:
    (given,) = advised([{TIER: TierLoad(3, requests=50)}], 1, 0)
    assert (given.change, why(given)) == (0, "The workers state no capacity, so the number stays.")


def test_advised_readings_are_averaged_and_a_tier_that_left_is_not_advised_on() -> None:
    gone = WorkerTier("gone", AGGREGATED)
    readings = [
        {TIER: TierLoad(4, requests=100, max_sequences=100), gone: TierLoad(1)},
        {TIER: TierLoad(4, requests=700, max_sequences=100)},
    ]
    (given,) = advised(readings, 1, 0)
    assert (given.tier, given.load.requests) == (TIER, 400)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--seconds", "0"), "--seconds is 0"),
        (("--seconds", "nan"), "--seconds is nan"),
        (("--min-workers", "-1"), "must be at least 0"),
        (("--min-workers", "5", "--max-workers", "4"), "less than --min-workers, 5"),
        (("--svg", "plot.svg"), "pass its trace with --replay"),
        (("--router", "127.0.0.1:1", "--seconds", "1"), "No router responds"),
    ],
)
def test_advise_bad_flags_are_one_sentence_and_exit_code_2(
    flags: tuple[str, ...], part: str, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sluice("advise", "--gateway", "http://127.0.0.1:1", *flags) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1
