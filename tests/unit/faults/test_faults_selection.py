"""Options that choose cells, and cells that cannot run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.faults.breaks import BREAKS
from tests.support.faults.host import NEEDS, Host
from tests.support.faults.injections import FAULTS
from tests.support.faults.loads import LOADS
from tests.support.faults.parts import PARTS, TOPOLOGIES, victims
from tests.support.faults.selection import UnknownNameError, broken, missing, planned

ABLE = Host(dict.fromkeys(NEEDS, str))
UNABLE = Host({name: lambda: "needs root" for name in NEEDS})


def test_planned_without_options_is_everything_that_can_happen() -> None:
    rows = planned((), (), (), ABLE)
    pairs = {(row.part.name, row.fault.name) for row in rows}
    assert len(pairs) == len(rows)
    assert {part for part, _ in pairs} == PARTS.keys()
    assert {fault for _, fault in pairs} == FAULTS.keys()
    assert ("redis", "flushall") in pairs
    assert ("router", "flushall") not in pairs
    suites = [row.suite for row in rows]
    assert sum(one != other for one, other in pairwise(suites)) == len(set(suites)) - 1


def test_fault_that_names_a_topology_runs_in_it() -> None:
    rows = planned(["worker", "router"], ["sigkill", "token-rotated"], ["chat"], ABLE)
    assert [(row.part.name, row.fault.name, row.suite) for row in rows] == [
        ("worker", "sigkill", ("pool", False)),
        ("router", "sigkill", ("pool", False)),
        ("worker", "token-rotated", ("secured", False)),
        ("router", "token-rotated", ("secured", False)),
    ]


def test_processes_have_clocks_of_their_own_only_where_these_are_wrong() -> None:
    rows = planned(["redis"], ["sigkill", "clock-10min", "flushall"], ["chat"], ABLE)
    assert [(row.fault.name, row.suite) for row in rows] == [
        ("sigkill", ("pool", False)),
        ("flushall", ("pool", False)),
        ("clock-10min", ("pool", True)),
    ]


def test_secured_suite_has_the_victims_of_the_parts_that_run_in_it() -> None:
    assert victims(TOPOLOGIES["secured"]) == victims(TOPOLOGIES["pool"])
    assert victims(TOPOLOGIES["cluster"]) == ["redis"]


def test_planned_options_choose_cells() -> None:
    rows = planned(["router", "worker"], ["sigkill"], ["chat", "route"], ABLE)
    assert [(row.part.name, row.fault.name) for row in rows] == [("worker", "sigkill"), ("router", "sigkill")]
    assert {load.name for load in rows[0].loads} == {"chat", "route"}


@pytest.mark.parametrize(
    ("options", "kind", "known"),
    [
        ((["engine"], [], []), "part", PARTS),
        (([], ["sigfoo"], []), "fault", FAULTS),
        (([], [], ["chats"]), "load", LOADS),
    ],
)
def test_planned_with_an_unknown_name_names_the_known_ones(
    options: tuple[list[str], list[str], list[str]], kind: str, known: dict[str, object]
) -> None:
    with pytest.raises(UnknownNameError, match=f"Unknown {kind} '.*'; choose from") as caught:
        planned(*options, ABLE)
    assert all(name in str(caught.value) for name in known)


def test_planned_fault_that_no_part_has_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="None of these faults"):
        planned(["router"], ["flushall"], [], ABLE)


def test_planned_pairs_run_only_in_their_topology() -> None:
    assert planned(["prefill-worker"], ["sigkill"], ["pairs"], ABLE)
    with pytest.raises(UnknownNameError):
        planned(["worker"], ["sigkill"], ["pairs"], ABLE)


def test_rows_that_need_what_is_missing_are_not_run() -> None:
    rows = planned(["router"], ["sigkill", "partition", "loss-5"], ["chat", "whole"], UNABLE)
    assert [bool(row.not_run) for row in rows] == [False, True, True]
    said = missing(rows)
    assert said == [
        "Not run, needs root: router/partition, router/loss-5.",
        "2 cells run.",
    ]
    skipped = rows[1].skipped
    assert skipped.not_run == "needs root"
    assert not skipped.red


def test_missing_is_silent_when_all_can_run() -> None:
    assert missing(planned(["router"], ["sigkill"], ["chat"], ABLE)) == []


def test_upgrade_without_another_tree_is_not_run(tmp_path: Path) -> None:
    [without] = planned(["router"], ["rolling-upgrade"], ["chat"], ABLE)
    assert "--other TREE" in without.not_run
    [with_tree] = planned(["router"], ["rolling-upgrade"], ["chat"], ABLE, tmp_path)
    assert with_tree.not_run == ""


def test_unknown_break_is_an_error() -> None:
    assert [found.name for found in broken(())] == [""]
    assert [found.name for found in broken(["migration-off"])] == ["migration-off"]
    assert [found.name for found in broken(["all"])] == list(BREAKS)
    with pytest.raises(UnknownNameError, match="leases-off"):
        broken(["everything"])


def test_every_break_turns_a_known_row_red() -> None:
    for found in BREAKS.values():
        part, fault = found.red
        assert planned([part], [fault], [], ABLE)
