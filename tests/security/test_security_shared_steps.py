"""One row, one failure: what a row raises in a shared step ends that row with a typed error, and nothing else."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import tests.support.shared_steps
from services.common.base.errors import SluiceError
from tests.support.shared_steps.excused import EXCUSED
from tests.support.shared_steps.rigs import INJECTED, RIGS, ROWS, Fault, Outcome
from tests.support.shared_steps.source import declared_steps, exists, undeclared_loops

for module in pkgutil.iter_modules(tests.support.shared_steps.__path__):
    importlib.import_module(f"{tests.support.shared_steps.__name__}.{module.name}")

STEPS = declared_steps()
MAX_POINTS = 200
WAIT_S = 120
"""Deadline of one run, which may load a vocabulary first."""


def test_shared_steps_declared_in_services_each_have_a_rig() -> None:
    assert STEPS
    assert sorted(RIGS) == sorted(STEPS), "write a rig for each declared step in tests/support/shared_steps"


def test_loops_where_rows_meet_are_in_declared_steps_or_excused() -> None:
    excused = {place for places in EXCUSED.values() for place in places}
    missing = sorted(undeclared_loops() - excused)
    assert not missing, "declare these functions with @shared_step and write their rigs, or excuse them with a reason"
    assert not sorted(excused - undeclared_loops()), "remove what has no loop, is declared, or is gone"
    assert all(map(exists, excused))


@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS - 1])
@pytest.mark.parametrize("step", sorted(STEPS))
async def test_shared_step_row_that_raises_ends_only_that_row(step: str, row: int) -> None:
    undisturbed = await _run(step, Fault())
    assert undisturbed.alive
    assert not undisturbed.errors
    assert sorted(undisturbed.outputs) == list(range(ROWS))
    for point in range(MAX_POINTS):
        fault = Fault(row, point)
        outcome = await _run(step, fault)
        if not fault.raised:
            break
        assert sorted(outcome.errors) == [row], f"point {point}"
        error = outcome.errors[row]
        assert isinstance(error, SluiceError)
        assert error.message
        assert INJECTED not in error.message
        assert "Traceback" not in error.message
        outcome.outputs.pop(row, None)
        others = {other: output for other, output in undisturbed.outputs.items() if other != row}
        assert outcome.outputs == others, f"point {point}"
        assert outcome.alive, f"point {point}"
    else:
        pytest.fail(f"more than {MAX_POINTS} points")
    assert point > 0, "the rig injects nothing into this row"


async def _run(step: str, fault: Fault) -> Outcome:
    result: Any = RIGS[step](fault)
    async with asyncio.timeout(WAIT_S):
        outcome = await result if inspect.isawaitable(result) else result
    assert isinstance(outcome, Outcome)
    return outcome
