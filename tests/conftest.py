"""What holds for every test: a machine that is busy makes no property false, and Ctrl-C means something."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx._config
import pytest
from hypothesis import settings

from tests.support.data.tiny_models import build_tiny_model
from tests.support.repository import ROOT
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.suite import Suite

sys.path.append(str(ROOT / "benchmarks"))  # last: its trace.py is not that of the standard library

settings.register_profile("sluice", deadline=None, max_examples=50)  # each run draws others
settings.load_profile("sluice")

for each in ("connect", "read", "write", "pool"):  # of clients that are told no timeout; 5 s, where a machine is busy
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, each, 60.0)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what they put into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or every process the tests start would ignore it, too


def pytest_configure(config: pytest.Config) -> None:
    # Suites that tests start must not be those that commands in other terminals find.
    state = tempfile.TemporaryDirectory(prefix="sluice-tests-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)
    if part := os.environ.get("SLUICE_TEST_COVERAGE"):
        from tests.support.branch_coverage import PARTS, BranchCoverage

        config.pluginmanager.register(BranchCoverage(config, PARTS[part]))


UNIT_SHARE = 0.1
"""Part of a run, at its end, for short files alone, so that no process is left with a long one."""
LONG = ("test_walk", "test_security_streams", "test_e2e_schemathesis", "test_conformance_rules", "test_e2e_survive")
"""The files that take longest, which start first for the same reason."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the files of each kind over the run, because some wait for processes and others compute."""
    kinds: dict[str, dict[Path, None]] = {}
    for item in items:
        kinds.setdefault(_kind(item.path), {})[item.path] = None
    places = {}
    for kind, files in kinds.items():
        share = 1.0 if kind == "unit" else 1.0 - UNIT_SHARE
        places.update({file: (number + 0.5) / len(files) * share for number, file in enumerate(files)})
    items.sort(key=lambda item: (item.path.stem not in LONG, places[item.path]))


def _kind(file: Path) -> str:
    return file.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that the tests of a module share; each uses keys of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, one for each module."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def suite() -> Iterator[Suite]:
    """A running suite for tests that leave it as it was: two mock workers, the default model, memory store."""
    with Suite("--speedup", "20") as running:
        yield running
