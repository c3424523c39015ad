"""`sluice up` with the real services: it serves what it prints, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.data.small_tekken import small_tekken
from tests.support.oracles.tracebacks import complaints
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.suite import SLUICE, command_of

DEADLINE_S = 240
STOPS_WITHIN_S = 20.0


class Up:
    """A `sluice up` on free ports, and every process it ever started."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(SLUICE), "up", "--port", "0", "--base-grpc-port", "0", "--speedup", "100", *flags],
                stdout=out,
                stderr=err,
                env={**os.environ, "NO_COLOR": "1"},
            )
        self.tree: set[psutil.Process] = set()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            self.remember()
            time.sleep(0.1)
        self.remember()

    def remember(self) -> None:
        if self.process.poll() is None:
            self.tree.update(psutil.Process(self.process.pid).children(recursive=True))

    def until_ready(self) -> None:
        self.until(lambda: "curl" in self.out)

    def child(self, name: str) -> psutil.Process:
        return next(process for process in self.tree if f"services.{name}" in command_of(process))

    def left(self, within_s: float) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.tree, timeout=within_s)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Up] = []

    def begin(*flags: str, default_model: bool = False) -> Up:
        model = () if default_model else ("--model", str(small_tekken()), "--model-name", "tekken")
        started.append(Up(tmp_path, *model, *flags))
        return started[-1]

    yield begin
    for up in started:
        up.remember()
        up.process.kill()
        up.process.wait()
        for process in up.left(0):
            process.kill()


def test_what_it_prints_works_and_ctrl_c_ends_everything_in_time(start: Start) -> None:
    up = start(default_model=True)
    up.until_ready()
    first, command = up.out.splitlines()
    assert first.startswith("ready http://127.0.0.1:")
    answer = subprocess.run([*shlex.split(command), "-sS"], capture_output=True, text=True, timeout=60, check=True)
    events = [line.removeprefix("data: ") for line in answer.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip()
    assert len(up.tree) >= 6
    began = time.monotonic()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(DEADLINE_S) == 0
    assert time.monotonic() - began < STOPS_WITHIN_S
    assert up.left(within_s=20) == []
    assert complaints(up.err) == []


def test_ctrl_c_during_a_stream_ends_everything_in_time(start: Start) -> None:
    up = start("--speedup", "0.01")
    up.until_ready()
    command = shlex.split(up.out.splitlines()[1])
    with subprocess.Popen([*command, "-sS"], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data: ")
        began = time.monotonic()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(DEADLINE_S) == 0
        assert time.monotonic() - began < STOPS_WITHIN_S
        client.stdout.read()
    assert up.left(within_s=20) == []


def test_ctrl_c_while_it_starts_ends_everything(start: Start) -> None:
    up = start()
    up.until(lambda: len(up.tree) >= 6)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(DEADLINE_S) == 0
    assert up.left(within_s=20) == []
    assert up.out == ""


def test_engine_that_does_not_load_is_said_in_the_workers_words(start: Start) -> None:
    up = start("--engine", "no_such_package:Engine")
    assert up.process.wait(DEADLINE_S) == 1
    assert "no_such_package" in up.err
    assert "exited with code" in up.err
    assert complaints(up.err) == []
    assert up.left(within_s=20) == []


def test_waits_for_redis_says_so_and_goes_on_when_it_is_there(start: Start, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    up = start("--redis", redis.url, "--routers", "2")
    try:
        up.until(lambda: "waiting for router-0: " in up.err and "waiting for router-1: " in up.err)
        assert f"127.0.0.1:{redis.port}" in up.err
        assert up.out == ""
        redis.start()
        up.until_ready()
        assert redis.url not in " ".join(word for process in up.tree for word in process.cmdline())
    finally:
        redis.stop()
