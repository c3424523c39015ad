"""The page and the JSON of a run."""

from __future__ import annotations

import json

from tests.support.faults.leftovers import Left
from tests.support.faults.outcome import Cell
from tests.support.faults.page import Run, as_json, as_page, mark, problem_of, rows_of
from tests.support.faults.row import Row

WHY = "A gateway's own connections end with it."


def run(*rows: Row) -> Run:
    return Run("python benchmarks/fault_matrix.py", "abc1234", "2 CPUs", rows)


def row(*cells: Cell, **more: object) -> Row:
    return Row("gateway", "sigkill", list(cells), **more)  # type: ignore[arg-type]


def good(load: str = "chat", **more: object) -> Cell:
    return Cell("gateway", "sigkill", load, requests=10, **more)  # type: ignore[arg-type]


def lines(page: str, start: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(start)]


def test_page_of_perfect_cells_says_ok() -> None:
    page = as_page(run(row(good(pause_s=1.25), good("whole", full_service_s=2.0), moved=3)))
    summed, cells = lines(page, "| gateway | sigkill |")
    assert summed == "| gateway | sigkill | 20 | 0 | 0 | 0 | 0 | 0 | 3 | 1.2 | 2.0 | 0 | 0 | ok |"
    assert cells == "| gateway | sigkill | ok | ok |"
    assert "Commit: abc1234" in page
    assert "## Red" not in page


def test_page_numbers_sentences_and_names_what_is_red() -> None:
    bad = good("tools", failed=1, errors=["request 1, +0.5 s: 502 | bad"])
    page = as_page(run(row(good(sentence=WHY, retried=2), bad)))
    summed, cells = lines(page, "| gateway | sigkill |")
    assert summed.endswith("| **red** |")
    assert cells == "| gateway | sigkill | 1 | **red** |"
    assert f"1. {WHY}" in page
    assert "- gateway, sigkill, tools: 1 failed of 10; first: request 1, +0.5 s: 502 \\| bad" in page


def test_row_with_something_left_is_red() -> None:
    found = row(good(), left=Left(reservations=2, files=1, keys={"{sluice}:claim:*": 1}))
    assert found.red
    page = as_page(run(found))
    assert "left: 2 reservations, 1 files, 1 of `{sluice}:claim:*`" in page


def test_row_whose_suite_is_not_whole_is_red() -> None:
    assert row(good(), problem="the suite is not whole").red


def test_row_that_did_not_run_is_neither_red_nor_among_the_rows() -> None:
    skipped = Row("gateway", "partition", not_run="needs root")
    page = as_page(run(row(good()), skipped))
    assert not skipped.red
    assert lines(page, "| gateway | partition |") == ["| gateway | partition | needs root |"]


def test_service_that_is_not_reached_is_said() -> None:
    cell = good(full_service_s=None)
    assert mark(cell, {}) == "**red**"
    assert problem_of(cell) == "full service not reached of 10"
    assert "| not reached |" in as_page(run(row(cell)))


def test_json_has_every_figure_and_what_is_red() -> None:
    found = json.loads(as_json(run(row(good(failed=1, errors=["x"])))))
    [shown] = found["rows"]
    assert shown["red"]
    assert shown["cells"][0]["failed"] == 1
    assert not shown["cells"][0]["perfect"]
    assert shown["left"]["reservations"] == 0


def test_rows_of_the_json_are_the_rows() -> None:
    bad = good("tools", failed=1, errors=["request 1, +0.5 s: 502"])
    rows = [row(good(sentence=WHY), bad, left=Left(keys={"k": 1}), moved=2), Row("dns", "sigkill", not_run="needs tc")]
    assert rows_of(as_json(run(*rows))) == rows
