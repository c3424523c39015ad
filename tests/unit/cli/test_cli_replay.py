"""A replay in virtual time is exact for one worker, the same every time, and refuses what is no trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from burst_trace import FILE, lines

from services.common.types.scaling import TierLoad
from services.worker.engines.mock.timing import decode_ms, prefill_ms
from sluice.cli.sizing.autoscalers import (
    STABILIZATION_S,
    SYNC_S,
    Autoscaler,
    Fixed,
    HpaOnCpu,
    HpaOnQueue,
    Observed,
    SluiceRule,
    WorkerBounds,
)
from sluice.cli.sizing.replay import Replay, drawn, replay
from sluice.cli.sizing.trace import TracedRequest, read_trace
from sluice.cli.sizing.virtual_fleet import VirtualFleet
from sluice.cli.sizing.virtual_worker import VirtualRequest, VirtualWorker, WorkerShape
from tests.unit.cli.conftest import Sluice

SHAPE = WorkerShape(max_sequences=4, max_batched_tokens=1_000, cache_tokens=10_000)
BOUNDS = WorkerBounds(1, 8)


def run_alone(worker: VirtualWorker, *flights: VirtualRequest) -> None:
    left = len(flights)
    while left:
        left -= len(worker.advance())


def test_worker_one_request_takes_its_chunks_and_its_steps() -> None:
    worker, flight = VirtualWorker(SHAPE, 0.0, 0.0), VirtualRequest(TracedRequest(5.0, 2_500, 11))
    worker.submit(flight, 5.0)
    run_alone(worker, flight)
    assert flight.ttft_s == pytest.approx((2 * prefill_ms(1_000) + prefill_ms(500)) / 1e3)
    assert flight.inter_token_s == pytest.approx(decode_ms(2_501 / 10_000) / 1e3)
    assert (worker.requests, worker.reserved_tokens, worker.prefill_tokens) == (0, 0, 0)
    assert worker.next_s == math.inf
    assert worker.busy_s == pytest.approx(flight.end_s - 5.0)


def test_worker_speed_divides_every_time() -> None:
    slow, fast = VirtualRequest(TracedRequest(0.0, 700, 9)), VirtualRequest(TracedRequest(0.0, 700, 9))
    for flight, speed in ((slow, 1.0), (fast, 4.0)):
        worker = VirtualWorker(WorkerShape(speed=speed), 0.0, 0.0)
        worker.submit(flight, 0.0)
        run_alone(worker, flight)
    assert slow.end_s == pytest.approx(4 * fast.end_s)


def test_worker_prompt_that_arrives_between_tokens_begins_at_the_next_step_and_slows_the_others() -> None:
    worker, first = VirtualWorker(SHAPE, 0.0, 0.0), VirtualRequest(TracedRequest(0.0, 100, 50))
    worker.submit(first, 0.0)
    worker.advance()
    begun = first.first_s
    step = (worker.next_s - begun) / 49
    second = VirtualRequest(TracedRequest(begun + 2.5 * step, 900, 1))
    worker.submit(second, second.request.at_s)
    assert (worker.next_s - begun) / step == pytest.approx(3)
    run_alone(worker, first, second)
    assert second.first_s == pytest.approx(begun + 3 * step + (prefill_ms(900) + decode_ms(104 / 10_000)) / 1e3)
    assert second.end_s == second.first_s
    assert first.inter_token_s > step


def test_worker_has_room_for_its_sequences_and_its_cache() -> None:
    worker, one = VirtualWorker(SHAPE, 0.0, 0.0), VirtualRequest(TracedRequest(0.0, 100, 10))
    assert not worker.has_room(VirtualRequest(TracedRequest(0.0, 9_999, 2)))
    for _ in range(SHAPE.max_sequences):
        assert worker.has_room(one)
        worker.submit(VirtualRequest(TracedRequest(0.0, 100, 10)), 0.0)
    assert not worker.has_room(one)
    assert worker.waiting == 3  # the first one alone was in the step that began at once


def observed(busy: float = 0.0, waiting: int = 0, workers: int = 2, **load: Any) -> Observed:
    return Observed([TierLoad(workers, max_sequences=100, **load)], busy, waiting)


@pytest.mark.parametrize(
    ("autoscaler", "seen", "workers"),
    [
        (HpaOnCpu(BOUNDS, 0.5), observed(busy=1.9), 4),
        (HpaOnCpu(BOUNDS, 0.5), observed(busy=1.05), 2),  # within the tolerance
        (HpaOnCpu(BOUNDS, 0.5), observed(busy=1.9, workers=2, starting=2), 4),
        (HpaOnQueue(BOUNDS, 5), observed(waiting=16), 4),
        (HpaOnQueue(BOUNDS, 5), observed(waiting=500), 6),  # by four at most
        (SluiceRule(BOUNDS), observed(requests=240), 3),
        (Fixed(BOUNDS), observed(workers=8), 8),
    ],
)
def test_autoscaler_wants_what_its_metric_says(autoscaler: Autoscaler, seen: Observed, workers: int) -> None:
    assert autoscaler.workers(0.0, seen) == workers


def test_autoscaler_shrinks_only_after_the_stabilization() -> None:
    autoscaler = HpaOnQueue(BOUNDS, 5)
    assert autoscaler.workers(0.0, observed(waiting=16)) == 4
    assert autoscaler.workers(SYNC_S, observed(workers=4)) == 4
    assert autoscaler.workers(STABILIZATION_S + SYNC_S, observed(workers=4)) == 1


def load(seconds: int, a_second: int) -> list[TracedRequest]:
    return [TracedRequest(number / a_second, 400, 40) for number in range(seconds * a_second)]


def test_fleet_every_request_ends_once_and_hours_are_those_of_the_workers() -> None:
    outcome = VirtualFleet(load(60, 2), Fixed(WorkerBounds(1, 3)), WorkerShape(), WorkerBounds(1, 3), 10.0).run()
    assert all(flight.request.at_s < flight.first_s <= flight.end_s for flight in outcome.flights)
    last = max(flight.end_s for flight in outcome.flights)
    assert outcome.worker_hours == pytest.approx(3 * last / 3_600)
    assert outcome.started == 0


def test_fleet_worker_receives_requests_only_after_its_start() -> None:
    requests = [TracedRequest(0.0, 900, 400) for _ in range(8)]
    outcomes = {
        delay: VirtualFleet(requests, SluiceRule(BOUNDS), SHAPE, BOUNDS, delay).run() for delay in (0.0, 1_000.0)
    }
    assert outcomes[0.0].started > 0
    firsts = {delay: max(flight.first_s for flight in outcome.flights) for delay, outcome in outcomes.items()}
    assert firsts[0.0] <= firsts[1_000.0]


def test_fleet_shrinks_after_a_burst_and_loses_no_request() -> None:
    requests = [*load(60, 30), *(TracedRequest(100.0 + 10 * number, 400, 40) for number in range(120))]
    shape = WorkerShape(max_sequences=16)
    outcome = VirtualFleet(requests, SluiceRule(BOUNDS), shape, BOUNDS, 20.0).run()
    workers = [number for _, number, _ in outcome.curve]
    assert max(workers) > 2
    assert workers[-1] == 1
    assert all(flight.end_s for flight in outcome.flights)


def test_replay_is_the_same_every_time_and_shows_the_price_of_each_autoscaler() -> None:
    question = Replay(FILE, copies=2, max_workers=8)
    rows, outcomes = replay(question)
    assert replay(question)[0] == rows
    by_name = {row.autoscaler: row for row in rows}
    assert list(by_name) == ["sluice", "HPA on CPU", "HPA on queue", "fixed"]
    assert all(row.requests == 2 * len(list(lines())) for row in rows)
    fixed = by_name["fixed"]
    assert all(row.worker_hours <= fixed.worker_hours for row in rows)
    assert all(row.within_objective <= fixed.within_objective for row in rows)
    assert by_name["sluice"].worker_hours < by_name["HPA on CPU"].worker_hours
    assert by_name["sluice"].within_objective > by_name["HPA on queue"].within_objective
    picture = drawn(outcomes)
    assert picture.startswith("<svg")
    assert all(name in picture for name in by_name)


def test_burst_trace_is_what_its_generator_writes() -> None:
    assert FILE.read_text("utf-8") == "".join(lines())


def test_read_trace_starts_at_zero_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entries = [(5_000, 10, 0), (3_000, 20, 7)]
    objects = [{"timestamp": at, "input_length": prompt, "output_length": out} for at, prompt, out in entries]
    path.write_text("\n\n".join(json.dumps(entry) for entry in objects))
    assert read_trace(path) == [TracedRequest(0.0, 20, 7), TracedRequest(2.0, 10, 1)]
    assert [request.at_s for request in read_trace(path, 2)] == [0.0, 0.1, 2.0, 2.1]


@pytest.mark.parametrize(
    ("text", "flags", "part"),
    [
        (None, (), "cannot be read"),
        ("", (), "has no requests"),
        ("\n \n", (), "has no requests"),
        ("no json", (), "line 1, is no request"),
        ("\xff", (), "line 1, is no request"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', (), "line 1, is no request"),
        ('{"timestamp": 0, "input_length": 5, "output_length": -1}', (), "line 1, is no request"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}', (), "line 1, is no request"),
        ('{"timestamp": 0, "input_length": 2000000, "output_length": 1}', (), "--cache-tokens is 1048576"),
        ("{}", ("--startup-s", "-1"), "--startup-s is -1"),
        ("{}", ("--ttft-s", "0"), "--ttft-s is 0"),
        ("{}", ("--copies", "0"), "--copies is 0"),
        ("{}", ("--min-workers", "0"), "--min-workers is 0"),
        ("{}", ("--min-workers", "3", "--max-workers", "2"), "less than --min-workers, 3"),
        ("{}", ("--speed", "nan"), "--speed is nan"),
        ("{}", ("--cpu-target", "-2"), "--cpu-target is -2"),
    ],
)
def test_replay_what_is_no_trace_is_one_sentence_and_exit_code_2(
    text: str | None,
    flags: tuple[str, ...],
    part: str,
    tmp_path: Path,
    sluice: Sluice,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text, "utf-8")
    assert sluice("advise", "--replay", str(path), *flags) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1


def test_replay_prints_a_table_or_json_and_draws_a_plot(
    tmp_path: Path, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    path, svg = tmp_path / "trace.jsonl", tmp_path / "plot.svg"
    path.write_text("".join(list(lines())[:50]), "utf-8")
    assert sluice("advise", "--replay", str(path), "--svg", str(svg)) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("sluice", "HPA on CPU", "HPA on queue", "fixed", "worker hours", "in time"))
    assert svg.read_text().startswith("<svg")
    assert sluice("advise", "--replay", str(path), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["requests"] for row in document["rows"]] == [50] * 4
    assert sluice("advise", "--replay", str(path), "--svg", str(tmp_path / "none" / "plot.svg")) == 2
    assert "cannot be written" in capsys.readouterr().err
