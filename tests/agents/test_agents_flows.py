"""Codex CLI, Claude Code and OpenCode, unmodified, on the default model; the mock's scripts make them deterministic."""

from __future__ import annotations

import pytest

from tests.support.clients.agents import Agent, script
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
