"""Fixtures for the tests of engines; in a `conftest.py`: `pytest_plugins = ["sluice.testing.fixtures"]`.

    async def test_engine_keeps_the_contract(engine_check, engine_settings):
        await engine_check(MyEngine.from_args(engine_settings()))

An async test needs a plugin of your choice, such as pytest-asyncio or anyio; `asyncio.run` does as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.contract.engine import GenerateContext
from services.worker.settings import WorkerSettings
from sluice import testing
from sluice.conformance import Report
from sluice.testing import engines

MODEL = "tiny"


@pytest.fixture
def mock_context() -> GenerateContext:
    """The context of a request that is never cancelled."""
    return testing.mock_context()


@pytest.fixture
def cancelling_context() -> Callable[[int], GenerateContext]:
    """Returns contexts whose `cancelled` becomes True after so many readings."""
    return engines.cancelling_context


@pytest.fixture
def engine_check() -> Callable[..., Awaitable[Report]]:
    """`sluice.testing.check`: tests an engine against the worker contract in this process."""
    return testing.check


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as of `sluice tiny-model`: a tokenizer, a template and random weights."""
    from sluice.cli import tiny_model

    folder = tmp_path_factory.mktemp("model") / MODEL
    tiny_model.run(folder)
    return folder


@pytest.fixture
def engine_settings(tiny_model: Path) -> Callable[..., WorkerSettings]:
    """Returns the settings of a worker that serves `tiny_model`; arguments are further settings."""

    def settings(**changes: Any) -> WorkerSettings:
        return WorkerSettings(**{"model": f"{MODEL}={tiny_model}", **changes})

    return settings
