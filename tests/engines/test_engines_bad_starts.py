"""A worker that cannot start, of every engine: one sentence at the end of its log, and a code other than zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import engine_suite as suite
from tests.engines.engine_list import ENGINES
from tests.support.data.tiny_models import build_servable

pytestmark = pytest.mark.engines


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> suite.EngineUnderTest:
    return ENGINES[request.param](build_servable(tmp_path).model)


async def test_start_with_a_folder_without_config_fails_with_a_message(
    engine: suite.EngineUnderTest, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    said = await suite.refused_start(engine, model=empty)
    assert "config.json" in said or "tokenizer" in said
    assert str(empty) in said


async def test_not_enough_memory(engine: suite.EngineUnderTest) -> None:
    blocks = 10**11 if engine.name == "mock" else 10**8  # the mock's are a few bytes each, the others' hold real caches
    said = (await suite.refused_start(engine, "--total-blocks", str(blocks))).lower()
    # Whose server is a program of its own, its log says more than its exit code does.
    assert "memory" in said or (engine.name == "vllm-grpc" and "see its log" in said)


async def test_unknown_engine_option_is_rejected(engine: suite.EngineUnderTest) -> None:
    said = await suite.refused_start(engine, "--", "--tensor-parallel-sise", "2")
    assert "sise" in said or "accepts no" in said or "see its log" in said
