"""Codex CLI, Claude Code and OpenCode, unmodified, on every shape of models; the mock runs scripts."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.clients.agents import WITHIN_S, Agent, ClaudeCode, Codex
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.recorded_prompts import Share, prompts_in, turns_of
from tests.support.servers.suite import Suite

pytestmark = pytest.mark.agents
BLOCK_SIZE = 16


def test_agent_first_prompt_prints_the_answer(agent: Agent) -> None:
    assert "Hello from the model." in agent.ask(f"Say hello. {agent.says('Hello from the model.')}")


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


def test_agent_session_computes_again_only_what_changed(
    agent: Agent, suite: Suite, prompts: Path, shares: list[Share]
) -> None:
    recorded_before = prompts_in(prompts)
    agent.ask(agent.steps([f"echo {number}" for number in range(5)], "Five steps are done."))
    agent.ask(agent.steps(["echo six", "echo seven"], "Seven steps are done."), resume=True)
    asked = {name: ids for name, ids in prompts_in(prompts).items() if name not in recorded_before}
    recorded = turns_of(asked, suite.address("router"), BLOCK_SIZE)
    longest = max(turn.tokens for turn in recorded)
    first, *turns = (turn for turn in recorded if turn.tokens > longest / 2)  # that of a title, without tools, is short
    assert len(turns) == 8
    share = Share(agent.shape.name, agent.command, turns)
    shares.append(share)
    assert share.of_ideal >= 0.95, turns
    *loop, _, next_step, last_step = itertools.pairwise([first, *turns])
    for earlier, turn in (*loop, next_step, last_step):  # templates may leave thoughts out before the second question
        assert turn.ideal >= 0.95 * earlier.tokens, turns


def test_codex_history_over_its_limit_is_compacted_and_the_session_continues(codex: Codex) -> None:
    codex.ask(f"First: {codex.says('A first answer.')}")
    codex.configuration = {"model_auto_compact_token_limit": 1_000}
    assert "After it." in codex.ask(f"Second: {codex.says('After it.')}", resume=True)
    rollouts = "".join(file.read_text() for file in codex.home.rglob("*.jsonl"))
    assert '"type":"compacted"' in rollouts


def test_claude_compact_command_keeps_the_session(claude: ClaudeCode) -> None:
    claude.ask(f"First: {claude.says('A first answer.')}")
    claude.ask("/compact", resume=True)
    assert "After it." in claude.ask(f"Second: {claude.says('After it.')}", resume=True)


def test_codex_prompt_that_takes_longer_than_its_idle_timeout_is_answered(slow_codex: Codex) -> None:
    limits = {"stream_idle_timeout_ms": 4_000, "stream_max_retries": 0, "request_max_retries": 0}
    slow_codex.configuration = {f"model_providers.sluice.{name}": limit for name, limit in limits.items()}
    began = time.monotonic()
    assert "After a while." in slow_codex.ask(f"Slow: {slow_codex.says('After a while.')}")
    assert time.monotonic() - began > limits["stream_idle_timeout_ms"] / 1000


@pytest.fixture(scope="session")
def loose(folder: Path) -> Iterator[LooseSuite]:
    """Two workers, of which a test may kill one; a token every 10 ms."""
    flags = ("--engine-args", "timing=fixed,fixed_step_ms=10,fixed_prefill_us=10")
    with LooseSuite(folder, worker_flags=flags) as running:
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
    process = agent.start(f"Count: {agent.says(' '.join(f'word{number}' for number in range(250)))}")
    victim = busy_worker(loose)
    loose.end(victim, signal.SIGKILL)
    output, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors[-2000:]
    assert "word249" in output
    metrics = httpx.get(f"{loose.url}/metrics").text
    assert 'sluice_gateway_migrations_total{outcome="moved"}' in metrics
    loose.start(victim)
    loose.wait_ready(2)
