"""`sluice.testing` as an author of engines uses it, with an engine made of `sluice.engine` alone in a test's folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from sluice.cli import tiny_model
from sluice.conformance import Verdict
from sluice.engine import Delta, Disaggregation, EngineConfig, FinishReason, Role, StopParams
from sluice.testing import ContractViolated, cancelling_context, check, collect, mock_context, mock_request
from tests.support.repository import ROOT

ENGINE = '''
"""Counts upwards from the last token of the prompt."""

import asyncio

from sluice.engine import Capability, Delta, EngineConfig, FinishReason, LLMEngine, Load, Usage


class Counting(LLMEngine):
    CAPABILITIES = frozenset({Capability.TOKEN_IDS, Capability.MIN_TOKENS, Capability.IGNORE_EOS})

    @classmethod
    def from_args(cls, settings):
        return cls()

    async def start(self, worker_id):
        return EngineConfig(model="count", vocab_size=1000, context_length=20000, capabilities=self.CAPABILITIES)

    async def generate(self, request, context):
        limit = min(request.stop.max_tokens or 10, 20000 - len(request.token_ids))
        for index in range(limit):
            await asyncio.sleep(0)
            token = (request.token_ids[-1] + 1 + index) % 1000
            stops = token in request.stop.stop_token_ids and index >= request.stop.min_tokens
            yield Delta(token_ids=[token], cached_tokens=0 if not index else None)
            if stops or context.cancelled:
                usage = Usage(len(request.token_ids), index + 1)
                yield Delta(finish_reason=FinishReason.STOP, usage=usage, stop_token_id=token if stops else None)
                return
        yield Delta(finish_reason=FinishReason.LENGTH, usage=Usage(len(request.token_ids), limit))

    def load(self):
        return [Load()]

    async def cleanup(self):
        await self.tasks.close()
'''
RULES = ("info", "one-terminal", "first-delta", "max-tokens", "usage", "cancel", "neighbours")


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "counting.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counting", raising=False)
    return __import__("counting")


async def test_request_of_an_engine_is_collected_and_cancelled(counting: ModuleType) -> None:
    engine = counting.Counting()
    output = await collect(engine, mock_request([7], max_tokens=4))
    assert (list(output.token_ids), output.finish_reason) == ([8, 9, 10, 11], FinishReason.LENGTH)
    assert output.usage is not None
    assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.error) == (1, 4, None)
    stopped = await collect(engine, mock_request([7], stop=StopParams(max_tokens=9, stop_token_ids=frozenset({9}))))
    assert stopped.deltas[-1].stop_token_id == 9
    cancelled = await collect(engine, mock_request(max_tokens=10_000), cancel_after=5)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert 5 <= len(cancelled.token_ids) < 10_000
    await engine.cleanup()


async def test_contexts_are_cancelled_after_so_many_readings(counting: ModuleType) -> None:
    engine = counting.Counting()
    output = await collect(engine, mock_request(max_tokens=100), cancelling_context(3))
    assert len(output.token_ids) == 4
    context = cancelling_context(2)
    assert [context.cancelled for _ in range(4)] == [False, False, True, True]
    assert not mock_context().cancelled
    context = cancelling_context(9)
    engine.abort(context)
    assert context.cancelled
    await engine.cleanup()


def _listening() -> set[object]:
    connections = psutil.Process().net_connections("inet")
    return {connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN}


async def test_check_of_an_engine_runs_the_rules_without_ports(counting: ModuleType) -> None:
    during: list[set[object]] = []

    class Watched(counting.Counting):  # type: ignore[misc, name-defined]
        def submit(self, request, context, sink):  # type: ignore[no-untyped-def]
            during.append(_listening())
            super().submit(request, context, sink)

    before = _listening()
    report = await check(Watched(), RULES)
    assert {result.rule.name for result in report.results} == {*RULES}
    assert {result.verdict for result in report.results} == {Verdict.PASSED}
    assert report.worker == "Watched"
    assert during
    assert all(listening == before for listening in during)


async def test_check_of_an_engine_that_ignores_max_tokens_names_the_rule(counting: ModuleType) -> None:
    class Endless(counting.Counting):  # type: ignore[misc, name-defined]
        async def generate(self, request, context):  # type: ignore[no-untyped-def]
            yield Delta(token_ids=[5] * (request.stop.max_tokens + 1), cached_tokens=0)
            yield Delta(finish_reason=FinishReason.LENGTH)

    with pytest.raises(ContractViolated, match="max-tokens") as violated:
        await check(Endless(), ["max-tokens", "info"])
    assert violated.value.report.failed == ["max-tokens"]


async def test_prefill_request_without_a_bootstrap_address_gets_that_of_the_engine(counting: ModuleType) -> None:
    given: list[Disaggregation | None] = []

    class Prefill(counting.Counting):  # type: ignore[misc, name-defined]
        async def start(self, worker_id: str) -> EngineConfig:
            return EngineConfig("count", role=Role.PREFILL, bootstrap_host="10.0.0.9", bootstrap_port=8998)

        def submit(self, request, context, sink):  # type: ignore[no-untyped-def]
            given.append(request.disaggregation)
            super().submit(request, context, sink)

    with pytest.raises(ContractViolated):  # it does not hand over
        await check(Prefill(), ["prefill"])
    assert given
    assert {(half.bootstrap_host, half.bootstrap_port) for half in given if half} == {("10.0.0.9", 8998)}


FIXTURES = """
import asyncio


def test_engine_with_the_fixtures(engine_check, engine_settings, mock_context, cancelling_context, tiny_model):
    from services.worker.engines.mock import MockEngine

    assert not mock_context.cancelled
    assert cancelling_context(0).cancelled
    assert engine_settings(role="decode").role == "decode"
    report = asyncio.run(engine_check(MockEngine.from_args(engine_settings(speedup=50)), ["card", "greedy"]))
    assert (tiny_model / "tokenizer.json").is_file() and not report.failed
"""


def test_fixtures_serve_an_engines_own_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["sluice.testing.fixtures"]\n')
    (tmp_path / "test_engine.py").write_text(FIXTURES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_documented_tests_of_the_example_pass(tmp_path: Path) -> None:
    tiny_model.run(tmp_path / "my-model")
    page = (ROOT / "docs" / "writing-an-engine.md").read_text("utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "sluice.testing" in block)
    (tmp_path / "test_parrot.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "examples" / "engine"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
