"""The walks of docs/structure.md are true: their modules run in this order when a chat is served, and so many run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.common.packages.model_files import DEFAULT_SOURCE
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.traced_service import FOLDER
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
WALKS = (
    ("From `POST /v1/chat/completions`", 20),
    ("From an engine's KV event", 14),
    ("From `RouteQuery`", 15),
)

PROCESSES = {
    "gateway": "gateway",
    "preprocess": "preprocess",
    "router": "router",
    "worker": "worker-0",
    "postprocess": "postprocess-0",
}
PERIODIC = 3
"""Modules that may run or not within a recording, in periodic tasks."""

FROM_ZMQ = {f"worker/kv_events/{name}.py" for name in ("zmq_feed", "wire", "event_sequencer", "translation")}
"""Only engines that publish over ZMQ use these; test_worker_kv_events_zmq runs them."""


def modules_of(start: str) -> list[str]:
    """Returns the modules that a walk names, as paths below services/."""
    page = (ROOT / "docs" / "structure.md").read_text()
    paragraph = next(text for text in page.split("\n\n") if text.startswith(start))
    folder = (re.findall(r"in `services/(\w+)`", paragraph) or [""])[0]
    _, _, listed = paragraph.partition(":")
    names = re.findall(r"`([\w/]+(?:\.py)?)`", listed)
    return [_resolved(name, folder) for name in names]


def _resolved(name: str, folder: str) -> str:
    choices = (name, f"{folder}/{name}")
    return next(each for each in choices if (ROOT / "services" / each).exists())


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns the calls between modules of each process while it serves a request."""
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        with LooseSuite(
            Path(DEFAULT_SOURCE), workers=1, postprocess=1, through="tests.support.servers.traced_service"
        ) as suite:
            names = PROCESSES.values()
            _ask(suite, "warm up " * 100)
            for name in names:
                os.kill(suite.pid(name), signal.SIGUSR1)
            for _ in range(2):
                _ask(suite, "a walk through the house " * 100)
                time.sleep(1.5)  # KV events are sent after the step
            for name in names:
                os.kill(suite.pid(name), signal.SIGUSR2)
            return {name: _recorded(folder / str(suite.pid(name))) for name in names}


def _ask(suite: LooseSuite, text: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 20, "stream": True}
    httpx.post(f"{suite.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def _recorded(path: Path) -> list[str]:
    wait_until(lambda: path.exists(), 20)
    return path.read_text().splitlines()


@pytest.mark.parametrize(("start", "most"), WALKS)
def test_walk_of_the_structure_page_names_few_modules(start: str, most: int) -> None:
    modules = modules_of(start)
    assert 5 < len(modules) <= most
    assert len(set(modules)) == len(modules)


@pytest.mark.parametrize(("start", "process"), [(WALKS[0][0], "gateway"), (WALKS[2][0], "router")])
def test_walk_of_the_structure_page_is_the_order_of_calls(
    start: str, process: str, traced: dict[str, list[str]]
) -> None:
    calls = iter(traced[process])
    missing = [module for module in modules_of(start) if not _follows(module, calls)]
    assert missing == []


def test_walk_of_a_kv_event_is_the_order_of_calls_in_each_process(traced: dict[str, list[str]]) -> None:
    modules = modules_of(WALKS[1][0])
    for process, service in (("worker-0", "worker"), ("router", "router")):
        calls = iter(traced[process])
        expected = [each for each in modules if each.startswith(service) and each not in FROM_ZMQ]
        assert [each for each in expected if not _follows(each, calls)] == []


@pytest.mark.parametrize("service", PROCESSES)
def test_structure_page_has_the_number_of_modules_that_run(service: str, traced: dict[str, list[str]]) -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    row = re.search(rf"^\| {service} \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert row is not None
    modules = set(traced[PROCESSES[service]])
    own = {module for module in modules if module.startswith(f"{service}/")}
    assert [int(number) for number in row.groups()] == [
        pytest.approx(len(own), abs=PERIODIC),
        pytest.approx(len(modules - own), abs=PERIODIC),
    ], f"{len(own)} and {len(modules - own)} run"


def _follows(module: str, calls: Iterator[str]) -> bool:
    """Consumes calls up to the first one of a module."""
    return any(call == module for call in calls)
