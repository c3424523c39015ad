"""The conformance kit: the mock passes every rule, and for each rule a broken worker fails that one and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from services.worker.conformance import Patience, Target, Verdict, Watcher, run, select
from tests.support.broken_workers import Honest, broken
from tests.support.tiny_models import build_tiny_model
from tests.support.worker_flaws import FLAWS
from tests.support.workers import hosted

ELSEWHERE = {"registration", "heartbeat", "kv-events", "kv-event-numbers", "resync", "drain"}
SPEEDUP = 100.0
CONTEXT = 20_000

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(folder: Path) -> AsyncIterator[str]:
    async with hosted(folder, speedup=SPEEDUP, context_length=CONTEXT, adapters=["polite"]) as host:
        yield f"127.0.0.1:{host.server.port}"


async def test_the_mock_passes_every_rule(folder: Path) -> None:
    watcher = Watcher()
    await watcher.start()
    fields = {"context_length": CONTEXT, "adapters": ["polite"], "routers": [watcher.address]}
    async with hosted(folder, speedup=SPEEDUP, **fields) as host:
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            stopping.append(asyncio.create_task(host.shut_down()))

        report = await run(Target(f"127.0.0.1:{host.server.port}", watcher=watcher, stop=stop))
        await asyncio.gather(*stopping)
    await watcher.close()
    assert [result for result in report.results if result.verdict is Verdict.FAILED] == []
    assert report.with_verdict(Verdict.NOT_CHECKED) == []
    assert len(report.results) == len(select())
    assert len(report.with_verdict(Verdict.PASSED)) > 50


async def test_there_is_a_flaw_for_every_rule() -> None:
    assert set(FLAWS) | ELSEWHERE == {rule.name for rule in select()}
    assert not set(FLAWS) & ELSEWHERE


async def test_an_honest_proxy_is_no_flaw(address: str) -> None:
    async with broken(address, Honest()) as proxy:
        report = await run(Target(proxy))
    assert [result for result in report.results if result.verdict is Verdict.FAILED] == []


@pytest.mark.parametrize("name", sorted(FLAWS))
async def test_a_broken_worker_fails_the_rule_it_breaks_and_no_other(address: str, name: str) -> None:
    flaw = FLAWS[name]()
    patience = replace(Patience(), settle_s=1.5) if flaw.slow else Patience()
    async with broken(address, flaw) as proxy:
        report = await run(Target(proxy), patience=patience)
    assert report.failed == [name], [(result.rule.name, result.seen) for result in report.results]
