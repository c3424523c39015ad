"""The conformance kit: the mock passes every rule, and for each rule a broken worker fails that one and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sluice.conformance import Patience, Target, Verdict, Watcher, run, select
from tests.support.fakes.broken_routers import FLAWS as SPOILED
from tests.support.fakes.broken_routers import spoiling
from tests.support.fakes.broken_workers import Honest, broken
from tests.support.fakes.worker_flaws import FLAWS
from tests.support.servers.workers import hosted

ELSEWHERE = {*SPOILED, "drain"}
ALWAYS = ("one-terminal", "usage", "load-returns")
SPEEDUP = 100.0
CONTEXT = 20_000
FIELDS: dict[str, Any] = {"context_length": CONTEXT, "adapters": ["polite"], "engine_args": "media=image"}
# For machines that are busy with other tests; `sluice conformance` itself allows a cancel the contract's two seconds.
PATIENCE = replace(Patience(), cancel_s=20.0, answer_s=20.0)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(folder: Path) -> AsyncIterator[str]:
    async with hosted(folder, speedup=SPEEDUP, **FIELDS) as host:
        yield f"127.0.0.1:{host.server.port}"


async def test_the_mock_passes_every_rule(folder: Path) -> None:
    watcher = Watcher()
    await watcher.start()
    async with hosted(folder, speedup=SPEEDUP, routers=[watcher.address], **FIELDS) as host:
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            stopping.append(asyncio.create_task(host.shut_down()))

        report = await run(Target(f"127.0.0.1:{host.server.port}", watcher=watcher, stop=stop), patience=PATIENCE)
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
        report = await run(Target(proxy), patience=PATIENCE)
    assert [result for result in report.results if result.verdict is Verdict.FAILED] == []


def part_of(name: str) -> list[str]:
    """The rules of the same part of the contract, and a few that every flaw might touch."""
    parts = {rule.name: rule.part for rule in select()}
    return [rule for rule in parts if parts[rule] == parts[name] or rule in ALWAYS]


async def failures(address: str, name: str, rules: list[str]) -> list[str]:
    flaw = FLAWS[name]()
    patience = replace(PATIENCE, settle_s=8.0) if flaw.slow else PATIENCE
    async with broken(address, flaw) as proxy:
        report = await run(Target(proxy), select(rules), patience)
    return report.failed


@pytest.mark.parametrize("name", sorted(FLAWS))
async def test_a_broken_worker_fails_the_rule_it_breaks(address: str, name: str) -> None:
    assert await failures(address, name, part_of(name)) == [name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FLAWS))
async def test_a_broken_worker_fails_no_other_rule(address: str, name: str) -> None:
    assert await failures(address, name, []) == [name]


@pytest.mark.parametrize("name", sorted(SPOILED))
async def test_a_worker_that_tells_its_router_wrong_things_fails_the_rule_about_them(folder: Path, name: str) -> None:
    watcher = Watcher()
    await watcher.start()
    # What does not come is waited for; one second is two heartbeats of the interval that the kit asks for.
    patience = replace(PATIENCE, settle_s=4.0 if name in ("heartbeat", "kv-events") else 20.0)
    async with (
        spoiling(watcher.address, SPOILED[name]) as router,
        hosted(folder, speedup=SPEEDUP, routers=[router]) as host,
    ):
        report = await run(Target(f"127.0.0.1:{host.server.port}", watcher=watcher), select(SPOILED), patience)
    await watcher.close()
    assert report.failed == [name], report.results


async def test_a_worker_that_does_not_stop_fails_drain(address: str) -> None:
    async def nothing() -> None:
        return

    report = await run(Target(address, stop=nothing), select(["drain"]), replace(PATIENCE, settle_s=0.5))
    assert report.failed == ["drain"]


async def test_the_two_parts_of_a_request_are_tried_on_a_pair_of_workers(folder: Path) -> None:
    async with (
        hosted(folder, speedup=SPEEDUP, role="prefill") as prefill,
        hosted(folder, speedup=SPEEDUP, role="decode") as decode,
    ):
        peer, address = (f"127.0.0.1:{host.server.port}" for host in (prefill, decode))
        first = await run(Target(peer), patience=PATIENCE)
        second = await run(Target(address, prefill_peer=peer), patience=PATIENCE)
        unpaired = await run(Target(address), select(["decode"]))
    assert (first.failed, second.failed) == ([], [])
    assert "prefill" in first.with_verdict(Verdict.PASSED)
    assert "max-tokens" in first.with_verdict(Verdict.NOT_CHECKED)
    assert {"decode", "max-tokens"} <= set(second.with_verdict(Verdict.PASSED))
    assert unpaired.with_verdict(Verdict.NOT_CHECKED) == ["decode"]
