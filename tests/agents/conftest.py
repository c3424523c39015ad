"""The agents of build/agents and suites of the default model and, with templates, of models in other shapes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from services.common.packages.model_files import DEFAULT_SOURCE, resolve
from tests.support.clients.agents import Agent, ClaudeCode, Codex, OpenCode
from tests.support.data.model_shapes import DEFAULT, SHAPES, Shape, build_shape
from tests.support.repository import ROOT
from tests.support.servers import recorded_prompts
from tests.support.servers.suite import Suite

A = TypeVar("A", bound=Agent)
INSTALLED = ROOT / "build" / "agents"
TEMPLATES = os.environ.get("SLUICE_CHAT_TEMPLATES", "")


SHARES: list[recorded_prompts.Share] = []


class Served(NamedTuple):
    """A shape, and its model: a folder, or that of the default model."""

    shape: Shape
    source: str


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the shares of cached tokens and what was left out."""
    if SHARES:
        terminalreporter.write_line(
            "| model | agent | cached, % of each prompt from the second on | least, of the ideal |"
        )
        terminalreporter.write_line("| --- | --- | --- | ---: |")
    for share in SHARES:
        turns = " ".join(f"{turn.cached / turn.tokens:.1%}".rstrip("%") for turn in share.turns)
        terminalreporter.write_line(f"| {share.shape} | {share.agent} | {turns} | {share.of_ideal:.1%} |")
    if not TEMPLATES:
        names = ", ".join(shape.template for shape in SHAPES)
        terminalreporter.write_line(
            "Only the default model was tested. For the others, set SLUICE_CHAT_TEMPLATES to a folder with the models' "
            f"published chat templates: {names}.",
            yellow=True,
        )


@pytest.fixture(scope="session", params=(DEFAULT, *(SHAPES if TEMPLATES else ())), ids=lambda shape: shape.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Each shape."""
    shape: Shape = request.param
    if shape is DEFAULT:
        return Served(shape, DEFAULT_SOURCE)
    return Served(shape, str(build_shape(shape, Path(TEMPLATES), tmp_path_factory.mktemp("shape") / shape.name)))


@pytest.fixture(scope="session")
def prompts(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the prompts of `suite`."""
    return tmp_path_factory.mktemp("prompts") / "prompts.jsonl"


@pytest.fixture(scope="session")
def shares() -> list[recorded_prompts.Share]:
    """Printed at the end: what was cached of the sessions' turns."""
    return SHARES


@pytest.fixture(scope="session")
def suite(served: Served, prompts: Path) -> Iterator[Suite]:
    """The model with two workers; the gateway records its prompts."""
    flags = ("--model", served.source, "--model-name", served.shape.name, "--speedup", "50", *recorded_prompts.FLAGS)
    environment = {recorded_prompts.VARIABLE: str(prompts), "PYTHONPATH": str(ROOT)}
    with Suite(*flags, env=environment) as running:
        yield running


@pytest.fixture(scope="session")
def other_suite(served: Served) -> Iterator[Suite]:
    """Another gateway with the same model under another name."""
    with Suite("--model", served.source, "--model-name", "other", "--speedup", "50") as running:
        yield running


@pytest.fixture(scope="session")
def folder(served: Served) -> Path:
    """The model's files."""
    return resolve(served.source)


def _made(kind: type[A], tmp_path: Path, suite: Suite, shape: Shape) -> A:
    agent = kind(INSTALLED, tmp_path / "home", tmp_path / "work")
    assert agent.binary.exists(), f"{agent.binary} is missing: run scripts/agents.sh"
    agent.url, agent.shape, agent.model = suite.url, shape, shape.name
    return agent


@pytest.fixture(params=[Codex, ClaudeCode, OpenCode], ids=lambda kind: kind.command)
def agent(request: pytest.FixtureRequest, tmp_path: Path, suite: Suite, served: Served) -> Agent:
    """Each agent, pointed to the suite."""
    kind: type[Agent] = request.param
    return _made(kind, tmp_path, suite, served.shape)


@pytest.fixture
def codex(tmp_path: Path, suite: Suite, served: Served) -> Codex:
    """Codex CLI."""
    return _made(Codex, tmp_path, suite, served.shape)


@pytest.fixture
def claude(tmp_path: Path, suite: Suite, served: Served) -> ClaudeCode:
    """Claude Code."""
    return _made(ClaudeCode, tmp_path, suite, served.shape)


@pytest.fixture
def slow_codex(tmp_path: Path) -> Iterator[Codex]:
    """Codex CLI on a model that reads a thousand tokens in a second; every second its gateway says that it is alive."""
    environment = {
        "SLUICE_GATEWAY_COMMENT_EVERY_S": "1",
        "SLUICE_WORKER_ENGINE_ARGS": "timing=fixed,fixed_prefill_us=1000",
    }
    with Suite("--model", DEFAULT_SOURCE, "--model-name", DEFAULT.name, env=environment) as running:
        yield _made(Codex, tmp_path, running, DEFAULT)
