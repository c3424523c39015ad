"""Codex CLI, Claude Code and OpenCode, unmodified, on the default model; the mock's scripts make them deterministic."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import grpc
import httpx
import pytest

from services.common.models import DEFAULT_SOURCE, resolve
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.clients.agents import WITHIN_S, Agent, ClaudeCode, Codex, script
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.suite import Suite

pytestmark = pytest.mark.agents


def test_agent_first_prompt_prints_the_answer(agent: Agent) -> None:
    assert "Hello from the model." in agent.ask(f"Say hello. {script('Hello from the model.')}")


def test_agent_loop_of_five_calls_runs_every_command_in_order(agent: Agent) -> None:
    commands = [f"echo {number} >> order.txt" for number in range(5)]
    assert "All steps are done." in agent.ask(agent.steps(commands, "All steps are done."))
    assert (agent.work / "order.txt").read_text().split() == ["0", "1", "2", "3", "4"]


def test_agent_session_that_is_resumed_on_another_gateway_and_model_continues(agent: Agent, other_suite: Suite) -> None:
    agent.ask(agent.steps(["echo first >> log.txt"], "First."))
    agent.url, agent.model = other_suite.url, "other"
    assert "Second." in agent.ask(agent.steps(["echo second >> log.txt"], "Second."), resume=True)
    assert (agent.work / "log.txt").read_text().split() == ["first", "second"]


def test_agent_edit_of_a_file_changes_it(agent: Agent) -> None:
    file = agent.work / "note.txt"
    file.write_text("old line\n")
    assert "Edited." in agent.ask(agent.edit(file, "old line", "new line", "Edited."))
    assert file.read_text().startswith("new line")


def test_codex_history_over_its_limit_is_compacted_and_the_session_continues(codex: Codex) -> None:
    codex.ask(f"First: {script('A first answer.')}")
    codex.configuration = {"model_auto_compact_token_limit": 1_000}
    assert "After it." in codex.ask(f"Second: {script('After it.')}", resume=True)
    rollouts = "".join(file.read_text() for file in codex.home.rglob("*.jsonl"))
    assert '"type":"compacted"' in rollouts


def test_claude_compact_command_keeps_the_session(claude: ClaudeCode) -> None:
    claude.ask(f"First: {script('A first answer.')}")
    claude.ask("/compact", resume=True)
    assert "After it." in claude.ask(f"Second: {script('After it.')}", resume=True)


@pytest.fixture(scope="module")
def loose() -> Iterator[LooseSuite]:
    """Two workers, of which a test may kill one; a token every 10 ms."""
    flags = ("--timing", "fixed", "--fixed-step-ms", "10", "--fixed-prefill-us", "10")
    with LooseSuite(resolve(DEFAULT_SOURCE), worker_flags=flags) as running:
        yield running


def busy_worker(loose: LooseSuite) -> str:
    """The worker that generates; waits for one."""
    deadline = time.monotonic() + WITHIN_S
    with grpc.insecure_channel(loose.address("router")) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        while time.monotonic() < deadline:
            for load in stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10).loads:
                if load.requests and not load.prefill_blocks:
                    return str(load.worker_id)
            time.sleep(0.02)
    raise AssertionError("no worker generates")


def test_agent_answer_whose_worker_is_killed_is_complete(agent: Agent, loose: LooseSuite) -> None:
    agent.url, agent.model = loose.url, "tiny"
    process = agent.start(f"Count: {script(' '.join(f'word{number}' for number in range(250)))}")
    victim = busy_worker(loose)
    loose.end(victim, signal.SIGKILL)
    output, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors[-2000:]
    assert "word249" in output
    metrics = httpx.get(f"{loose.url}/metrics").text
    assert 'sluice_gateway_migrations_total{outcome="moved"}' in metrics
    loose.start(victim)
    loose.wait_ready(2)
