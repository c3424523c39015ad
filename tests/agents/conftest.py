"""The agents of build/agents and two suites of the default model, as `make run` serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from services.common.models import DEFAULT_SOURCE
from tests.support.clients.agents import Agent, ClaudeCode, Codex, OpenCode
from tests.support.repository import ROOT
from tests.support.servers.suite import Suite

A = TypeVar("A", bound=Agent)
INSTALLED = ROOT / "build" / "agents"


@pytest.fixture(scope="session")
def suite() -> Iterator[Suite]:
    """The default model with two workers."""
    with Suite("--model", DEFAULT_SOURCE, "--model-name", "tekken", "--speedup", "50") as running:
        yield running


@pytest.fixture(scope="session")
def other_suite() -> Iterator[Suite]:
    """Another gateway with a model of another name."""
    with Suite("--model", DEFAULT_SOURCE, "--model-name", "other", "--speedup", "50") as running:
        yield running


def _made(kind: type[A], tmp_path: Path, suite: Suite) -> A:
    agent = kind(INSTALLED, tmp_path / "home", tmp_path / "work")
    assert agent.binary.exists(), f"{agent.binary} is missing: run scripts/agents.sh"
    agent.url = suite.url
    return agent


@pytest.fixture(params=[Codex, ClaudeCode, OpenCode], ids=lambda kind: kind.command)
def agent(request: pytest.FixtureRequest, tmp_path: Path, suite: Suite) -> Agent:
    """Each agent, pointed to the suite."""
    kind: type[Agent] = request.param
    return _made(kind, tmp_path, suite)


@pytest.fixture
def codex(tmp_path: Path, suite: Suite) -> Codex:
    """Codex CLI."""
    return _made(Codex, tmp_path, suite)


@pytest.fixture
def claude(tmp_path: Path, suite: Suite) -> ClaudeCode:
    """Claude Code."""
    return _made(ClaudeCode, tmp_path, suite)
