"""The metrics that SGLang's processes leave in files."""

from __future__ import annotations

import asyncio
import logging

import pytest

from services.worker.engines.sglang import metrics
from services.worker.engines.sglang.metrics import SchedulerMetrics

Answers = list[str | Exception]


async def read(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told after each of the answers."""
    scheduler_metrics, told, left = SchedulerMetrics(), [], iter(answers)

    def answer() -> str:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    async def wait(seconds: float) -> None:
        told.append(scheduler_metrics.text)
        if len(told) == len(answers):
            raise asyncio.CancelledError

    monkeypatch.setattr(metrics, "_read", answer)
    monkeypatch.setattr(metrics.asyncio, "sleep", wait)
    with pytest.raises(asyncio.CancelledError):
        await scheduler_metrics.run()
    return told


async def test_files_that_cannot_be_read_leave_the_last_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: Answers = ["one", FileNotFoundError("gone"), ValueError("no JSON"), "two"]
    with caplog.at_level(logging.WARNING):
        assert await read(answers, monkeypatch) == ["one", "one", "one", "two"]
    assert len([record for record in caplog.records if record.name == metrics.__name__]) == 1


async def test_a_new_trouble_is_logged_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert await read([OSError(), "one", OSError()], monkeypatch) == ["", "one", "one"]
    assert len([record for record in caplog.records if record.name == metrics.__name__]) == 2
