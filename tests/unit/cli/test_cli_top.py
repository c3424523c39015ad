"""`sluice top`'s picture fits every terminal, and does not grow."""

from __future__ import annotations

import io
import re
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

from sluice.cli.live.render import MIN_SIZE, frame, sparks, summary
from sluice.cli.live.top import REQUESTS, SAMPLES, Picture
from tests.unit.cli.conftest import Sluice

RATES = {"requests": 3.5, "output_tokens": 700.0, "live": 4, "failed": 0.0}


def row(name: str, health: str = "ok") -> dict[str, Any]:
    return {
        "id": name,
        "health": health,
        "role": "aggregated",
        "engine": "mock 2",
        "address": "127.0.0.1:50061",
        "running": 1,
        "waiting": 0,
        "live": 0,
        "requests_s": 2.5,
        "tokens_s": 350.0,
        "used": 0.25,
        "cached": 0.5,
        "hit_rate": None,
    }


def request(number: int) -> dict[str, Any]:
    times = dict.fromkeys(("tokenize_ms", "route_ms", "first_ms", "rest_ms"), 1.5)
    counts = {"prompt_tokens": 12, "cached_tokens": 8, "output_tokens": 20}
    more = {
        "workers": ["worker-0"],
        "outcome": "finished",
        "degraded": [],
        "model": "m",
        "began_unix_ms": 1_700_000_000_000,
    }
    return {"id": f"chatcmpl-{number:024}", **times, **counts, **more}


def state(workers: int = 3, requests: int = 40) -> dict[str, Any]:
    return {
        "rates": RATES,
        "history": {"output_tokens": [0.0, 350.0, 700.0]},
        "nodes": {
            "router": {"serving": ["127.0.0.1:50052"], "away": ["127.0.0.1:50053"]},
            "preprocess": {"serving": [], "away": []},
        },
        "degraded": {"store_unavailable": 3},
        "workers": [row(f"worker-{number}") for number in range(workers - 1)] + [row("lost", "gone")],
        "hidden_workers": 0,
        "requests": [request(number) for number in range(requests)],
    }


def shown(width: int, height: int, problem: str = "", **more: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(frame(state(**more), problem, width, height))
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue().splitlines()


@pytest.mark.parametrize("height", [10, 12, 24, 50])
@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("workers", [1, 3, 60])
def test_it_fits(width: int, height: int, workers: int) -> None:
    lines = shown(width, height, workers=workers)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("lost" in line and "gone" in line for line in lines), "a worker in trouble comes first"


def test_small_terminal_shows_the_summary_and_a_hint() -> None:
    text = " ".join(shown(40, 6))
    assert "The terminal has 40×6" in text
    assert f"{MIN_SIZE[0]}×{MIN_SIZE[1]}" in text
    assert "3.5 requests/s" in text


def test_requests_have_time_model_and_outcome() -> None:
    began = datetime.fromtimestamp(1_700_000_000).strftime("%H:%M:%S")
    (line, *_) = [line for line in shown(160, 30) if "00000039" in line]
    assert re.search(rf"{began}\s+m\s+worker-0\b", line)
    assert "finished" in line


def test_own_streams_of_the_gateway_count_as_running_until_the_worker_reports_them() -> None:
    busy = state()
    busy["workers"] = [{**row("worker-7"), "running": 0, "live": 3}]
    console = Console(file=io.StringIO(), width=120, height=24, color_system=None, record=True)
    console.print(frame(busy, "", 120, 24))
    (line,) = [line for line in console.export_text().splitlines() if "worker-7" in line]
    assert re.search(r"worker-7 +ok +3 +0 +2\.5 +350 ", line), line


def test_what_is_wrong_is_shown_beside_what_is_known() -> None:
    assert any("cannot be reached" in line for line in shown(80, 24, "The gateway cannot be reached."))
    assert any("store_unavailable ×3" in line for line in shown(80, 24))
    assert any("router 1 of 2  preprocess 0" in line for line in shown(80, 24))


def test_the_summary_counts_workers_that_are_well() -> None:
    assert summary(state()).endswith("2 of 3 workers healthy")


def test_deltas_change_what_they_name_and_nothing_grows() -> None:
    picture = Picture()
    picture.take("whole", state())
    for number in range(3 * SAMPLES):
        news = {"rates": {**RATES, "output_tokens": float(number)}, "requests": [request(number)]}
        picture.take("message", {**news, "workers": [row("late")], "left": ["worker-1"]})
    known = picture.state
    assert [one["id"] for one in known["workers"]] == ["worker-0", "lost", "late"]
    assert len(known["requests"]) == REQUESTS
    assert known["history"]["output_tokens"] == [float(number) for number in range(2 * SAMPLES, 3 * SAMPLES)]
    assert known["nodes"] == state()["nodes"]


def test_sparks_follow_the_values() -> None:
    assert sparks([0, 1, 2, 4, 8]) == "▁▂▃▅█"
    assert sparks([0, 0]) == "▁▁"
    assert sparks([]) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("top", "--once", "--gateway", "http://127.0.0.1:1"), "cannot be reached"),
        (("top", "--gateway", "nowhere"), "--gateway nowhere is not a URL"),
        (("workers", "--router", "127.0.0.1:1"), "No router responds at 127.0.0.1:1"),
        (("workers", "--router", "nowhere"), "--router nowhere is not a host:port"),
        (("route", ""), "must not be empty"),
        (("route", "hello", "--tls", "/no/such/folder"), "has no ca.pem"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_two(
    arguments: tuple[str, ...], message: str, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sluice(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("sluice: ")
    assert message in error
    assert "Traceback" not in error
