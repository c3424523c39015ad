"""Pipelines of single models, and stages that are called when a model appears and when it has left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import GenerationRequest, TokenizedPrompt
from services.gateway.pipeline import model_lifecycle
from services.gateway.pipeline import models as pipelines_module
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.stages import Components
from tests.support.servers.survival import Stage, asking, staged
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[3] / "examples" / "plugins"
PROMPT = "Tell me of rivers."
LISTENING = PipelineConfig(stages={"tokenize": "listening_stage:EventListener"})


class EventListener:
    """A tokenize stage that records its calls, in order."""

    calls: ClassVar[list[str]] = []
    broken: ClassVar[bool] = False

    def __init__(self, components: Components) -> None:
        self._preprocess = components.preprocess

    async def on_model(self, worker: WorkerEntry) -> None:
        await asyncio.sleep(0.05)
        if self.broken:
            raise RuntimeError("cannot be set up")
        self.calls.append(f"up {worker.model}")

    async def on_model_removed(self, name: str) -> None:
        self.calls.append(f"removed {name}")

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        self.calls.append(f"tokenize {request.model}")
        return await self._preprocess.tokenize(request.model, request.prompt, worker.block_size, "", "")


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("listening_stage")
    module.EventListener = EventListener
    monkeypatch.setitem(__import__("sys").modules, "listening_stage", module)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(pipelines_module, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(model_lifecycle, "SET_UP_RETRY_S", 0.1)
    EventListener.calls, EventListener.broken = [], False


async def test_model_with_a_postprocess_stage_leaves_others_on_the_replicas(folder: Path) -> None:
    own = PipelineConfig(stages={"postprocess": "own_stages:TokenNumbers"})
    config = PipelineConfig(models={"numbers": own})
    async with staged(folder, models=("tiny", "numbers"), config=config) as stage:
        alone = await stage.ask(asking("a", PROMPT))
        heard = await asyncio.gather(
            *(stage.ask(asking(f"{model}{i}", PROMPT, model)) for i in range(8) for model in ("tiny", "numbers"))
        )
        assert {one.comparable.text for one in heard[::2]} == {alone.text}
        assert all(one.text.startswith("(") for one in heard[1::2])
        await stage.quiet()


async def test_model_whose_engine_makes_text_leaves_others_on_the_replicas(folder: Path) -> None:
    config = PipelineConfig(models={"engine": PipelineConfig(postprocessing="engine")})
    async with staged(folder, models=("tiny", "engine"), config=config, processing="full") as stage:
        alone = [await stage.ask(asking("a", PROMPT, model)) for model in ("tiny", "engine")]
        heard = await asyncio.gather(
            *(stage.ask(asking(f"{model}{i}", PROMPT, model)) for i in range(8) for model in ("tiny", "engine"))
        )
        assert {one.text for one in heard[::2]} == {alone[0].text}
        assert {one.text for one in heard[1::2]} == {alone[1].text}
        assert alone[0].text == alone[1].text
        await stage.quiet()


async def test_migration_of_one_model_is_off_while_others_move(folder: Path) -> None:
    config = PipelineConfig(models={"still": PipelineConfig(migration=False)})
    async with staged(folder, models=("tiny", "tiny", "still", "still"), config=config) as stage:
        stage.reservations.order.sort()
        for knife in (0, 2):
            stage.knives[knife].set(5)
        moved, failed = await asyncio.gather(stage.ask(asking("a", PROMPT)), stage.ask(asking("b", PROMPT, "still")))
        assert moved.finish is not None
        assert moved.finish.migrations == 1
        assert failed.error is not None
        await stage.quiet()


async def test_stage_is_called_before_the_first_request_of_a_model(folder: Path) -> None:
    async with staged(folder, workers=1, config=LISTENING) as stage:
        assert (await stage.ask(asking("a", PROMPT))).text
        assert (await stage.ask(asking("b", PROMPT))).text
    assert EventListener.calls == ["up tiny", "tokenize tiny", "tokenize tiny"]


def leave(stage: Stage) -> WorkerEntry:
    """Takes the only worker out of the catalogue; returns its entry."""
    registry = stage.pipelines.registry
    entry = registry.workers["w0"]
    registry._down("w0")
    return entry


async def test_stage_is_called_when_a_model_has_left_for_the_grace_period(folder: Path) -> None:
    async with staged(folder, workers=1, config=LISTENING, model_grace_s=0.2) as stage:
        await until(lambda: EventListener.calls == ["up tiny"])
        entry = leave(stage)
        await until(lambda: EventListener.calls == ["up tiny", "removed tiny"])
        stage.pipelines.registry._up(entry)
        await until(lambda: EventListener.calls == ["up tiny", "removed tiny", "up tiny"])


async def test_model_that_returns_within_the_grace_period_is_not_removed(folder: Path) -> None:
    async with staged(folder, workers=1, config=LISTENING, model_grace_s=300) as stage:
        await until(lambda: EventListener.calls == ["up tiny"])
        entry = leave(stage)
        for _ in range(5):
            stage.pipelines.look()
        stage.pipelines.registry._up(entry)
        stage.pipelines.look()
        assert (await stage.ask(asking("a", PROMPT))).text
    assert EventListener.calls == ["up tiny", "tokenize tiny"]


async def test_stage_that_cannot_be_set_up_refuses_requests_until_it_can(folder: Path) -> None:
    EventListener.broken = True
    async with staged(folder, workers=1, config=LISTENING) as stage:
        with pytest.raises(SluiceError, match="is not set up for model") as refused:
            await stage.ask(asking("a", PROMPT))
        assert (refused.value.kind, refused.value.code) == (ErrorKind.UNAVAILABLE, "stage_unavailable")
        EventListener.broken = False
        await until(lambda: EventListener.calls == ["up tiny"])
        assert (await stage.ask(asking("b", PROMPT))).text
        await stage.quiet()
