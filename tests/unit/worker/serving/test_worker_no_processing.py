"""A worker without the extension that tokenizes beside the engine."""

from __future__ import annotations

import pytest

from services.common.packages import extensions
from services.common.packages.extensions import OWN, Extension
from services.worker.contract.generation import GenerateRequest
from services.worker.serving.worker import Worker
from services.worker.settings import ProcessingOptions
from tests.support.fakes.engines import ScriptedEngine
from tests.support.oracles.errors import raises_error

BROKEN = Extension("sluice.processing", "worker", "absent_processing:Processing", OWN, "1", "worker")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], "The extension services/worker/local_processing is not installed."),
        ([BROKEN], 'the module absent_processing is not installed; run: pip install "sluice-llm[worker]".'),
    ],
)
async def test_worker_without_processing_takes_token_ids_only_unless_it_is_required(
    found: list[Extension], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extensions, "_extensions", lambda group: found)
    engine = ScriptedEngine()
    worker = Worker(engine, "w", processing=ProcessingOptions("prompts"))
    before = (await Worker(ScriptedEngine(), "plain").start()).capabilities
    assert (await worker.start()).capabilities == before
    assert [record.message.endswith(reason) for record in caplog.records if record.levelname == "WARNING"] == [True]
    assert not worker.processing.makes_prompt_of(GenerateRequest("r", "m", text="hello"))
    await worker.cleanup()
    with raises_error(match=reason.partition(";")[0]):
        await Worker(ScriptedEngine(), "w", processing=ProcessingOptions("full", required=True)).start()
