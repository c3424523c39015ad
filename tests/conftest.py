"""What holds for every test: a machine that is busy makes no property false, and Ctrl-C means something."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx._config
import pytest
from hypothesis import settings

from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.redis_server import RedisServer

settings.register_profile("sluice", deadline=None)
settings.load_profile("sluice")

for each in ("connect", "read", "write", "pool"):  # of clients that are told no timeout; 5 s, where a machine is busy
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, each, 60.0)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what they put into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or every process the tests start would ignore it, too


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
