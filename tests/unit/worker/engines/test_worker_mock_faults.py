"""Every fault of the mock engine does what it says, and `none` ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import FinishReason
from services.worker.engines.mock import MockEngine
from services.worker.engines.mock.faults import CRASH_CODE, Faults
from services.worker.settings import WorkerSettings
from tests.support.fakes.engines import RecordingSink, request
from tests.support.oracles.errors import raises_error
from tests.support.waiting import until


@asynccontextmanager
async def engine(folder: Path, **fields: Any) -> AsyncIterator[MockEngine]:
    made = MockEngine.from_args(WorkerSettings(model=f"tiny={folder}", **{"speedup": 1e6, **fields}))
    await made.start("w")
    try:
        yield made
    finally:
        await made.cleanup()


async def inject(engine: MockEngine, fault: str) -> str:
    return (await engine.control("inject_fault", {"fault": fault}))["fault"]


def submit(engine: MockEngine, name: str = "r", **fields: Any) -> RecordingSink:
    sink = RecordingSink()
    engine.submit(request(name, **fields), GenerateContext(name), sink)
    return sink


async def ended(sink: RecordingSink) -> FinishReason | None:
    async with asyncio.timeout(20):
        await sink.done.wait()
    return sink.reason


@pytest.mark.parametrize("text", ["earthquake", "poison", "crash=fast", "crash=-1", "error_after=0", "poison=nan", ""])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        Faults().with_fault(text)


async def test_errors_come_after_so_many_tokens(folder: Path) -> None:
    async with engine(folder, engine_args="fault=error_after=3") as broken:
        sink = submit(broken, ignore_eos=True)
        assert await ended(sink) is FinishReason.ERROR
        assert len(sink.token_ids) == 3
        assert sink.usage is not None
        assert sink.usage.completion_tokens == 3
        assert sink.error is not None
        assert (sink.error.code, sink.error.retryable) == ("injected_fault", True)
        assert broken.load()[0].used_blocks == 0
        await inject(broken, "none")
        assert await ended(submit(broken, max_tokens=5, ignore_eos=True)) is FinishReason.LENGTH


async def test_crash_ends_the_process_after_so_many_steps(folder: Path) -> None:
    codes: list[int] = []

    def die(code: int) -> None:
        codes.append(code)
        raise SystemError("dead")

    async with engine(folder) as doomed:
        failures: list[str] = []
        doomed.on_failure = lambda name, error: failures.append(name)
        doomed._operations.faults = replace(Faults(die=die), crash_in=4)
        sink = submit(doomed, ignore_eos=True)
        await until(lambda: failures)
        assert codes == [CRASH_CODE]
        assert len(sink.token_ids) == 4


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("inject_fault", {}),
        ("sleep", {"level": "9"}),
        ("load_lora", {}),
        ("load_lora", {"name": "x", "path": "/no/such/folder"}),
        ("unload_lora", {"name": "x"}),
        ("dance", {}),
    ],
)
async def test_actions_with_wrong_arguments_are_refused(folder: Path, action: str, arguments: dict[str, str]) -> None:
    async with engine(folder) as made:
        with pytest.raises(SluiceError):
            await made.control(action, arguments)
