"""`sluice conformance` finds nothing wrong with any engine: its command, all rules, the worker's events and its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common.net.ports import free_port
from tests.engines import engine_suite as suite
from tests.engines.engine_list import ENGINES
from tests.support.data.tiny_models import build_servable

pytestmark = pytest.mark.engines

KIT_S = 900


@pytest.mark.parametrize("name", ENGINES)
async def test_conformance_kit_finds_no_violation(name: str, tmp_path: Path) -> None:
    folders = build_servable(tmp_path)
    adapters = () if name == "vllm-grpc" else ("--adapters", f"one={folders.adapter}")
    watcher = f"127.0.0.1:{free_port()}"
    async with suite.running(ENGINES[name](folders.model), *adapters, "--routers", watcher) as worker:
        passed, not_checked = await suite.conformance(worker, watcher, KIT_S)
        print(f"{name}: {passed} rules pass")
        assert passed > 50
        assert not_checked == 0
        async with asyncio.timeout(suite.CALL_S):
            assert await worker.process.wait() == 0
