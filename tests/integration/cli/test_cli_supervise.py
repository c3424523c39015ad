"""The supervisor with real processes that are not our services: everything comes up, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import sluice
from services.common.net.ports import free_port
from sluice.cli.suites import running_suites
from sluice.cli.up.restarts import MAX_RESTARTS

ROOT = Path(sluice.__file__).parents[1]
DEADLINE_S = 40.0

# A service in a few lines. Its arguments after the address: `stuck` ignores SIGTERM, `silent` answers no request,
# `parent` starts a process of its own, `dies` exits with code 7 when asked for /die, `never` is never ready.
FAKE_HTTP = """
import http.server, os, signal, subprocess, sys
address, *traits = sys.argv[1:]
host, _, port = address.rpartition(":")
print("ARGS " + " ".join(traits), flush=True)
if "stuck" in traits:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "parent" in traits:
    print("GRANDCHILD", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
if "fails" in traits:
    print("12:00:00.000 ERROR   fake  cannot start", flush=True)
    sys.exit(7)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        if "never" in traits:
            print("12:00:00.000 WARNING fake  Redis cannot be reached", file=sys.stderr, flush=True)
        self.send_response(503 if "never" in traits else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""

FAKE_GRPC = """
import asyncio, sys
from services.common.rpc.runner import run
from services.common.base.tasks import Stop
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import router_pb2
settings = GrpcServiceSettings(listen=sys.argv[1])
async def serve(stop: Stop) -> None:
    server = GrpcServer(settings, router_pb2.DESCRIPTOR)
    await server.start()
    await asyncio.sleep(0.3)
    await server.set_serving(True)
    await stop.wait()
    await server.stop(0)
run("fake", settings, serve)
"""

DRIVER = """
import os, sys
from rich.console import Console
from sluice.cli.up import supervisor as up
from sluice.cli.up.plan import Process
from sluice.cli.up.progress import View
from sluice.cli.up.restarts import Restarts
processes = []
for word in sys.argv[1:]:
    name, module, port, *traits = word.split(",")
    health = "http" if module == "fake_http" else "grpc"
    processes.append(Process(name, module, (f"127.0.0.1:{port}", *traits), "127.0.0.1", int(port), health))
restart = "RESTART" in os.environ
up.Restarts = lambda: Restarts(first_pause_s=float(os.environ.get("PAUSE", 0.05)))
up.KILL_AFTER_S = float(os.environ.get("KILL_AFTER", up.KILL_AFTER_S))
sys.exit(up.run(processes, View(processes, Console(stderr=True, highlight=False)), "tekken", restart))
"""


class Suite:
    """A `sluice up` over fake services, with everything it printed."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(folder / "driver.py"), *words],
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))},
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
            self.remember()
            assert time.monotonic() < deadline, self.err
            time.sleep(0.05)
        self.remember()

    def until_ready(self) -> None:
        self.until(lambda: "curl" in self.out)

    def remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.tree.update(psutil.Process(self.process.pid).children(recursive=True))

    def ends(self, number: signal.Signals | None = None, within_s: float = DEADLINE_S) -> int:
        self.remember()
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(within_s)

    def left(self, within_s: float = 0) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.tree, timeout=within_s)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        for process in self.tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()


Start = Callable[..., Suite]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "fake_http.py").write_text(FAKE_HTTP)
    (tmp_path / "fake_grpc.py").write_text(FAKE_GRPC)
    (tmp_path / "driver.py").write_text(DRIVER)
    suites: list[Suite] = []

    def begin(*words: str) -> Suite:
        suites.append(Suite(tmp_path, *words))
        return suites[-1]

    yield begin
    for suite in suites:
        suite.kill()


def test_comes_up_says_so_and_stops_on_ctrl_c(start: Start) -> None:
    port = free_port()
    suite = start(f"router,fake_grpc,{free_port()}", f"gateway,fake_http,{port}")
    suite.until_ready()
    first, second = suite.out.splitlines()
    assert first == f"ready http://127.0.0.1:{port}"
    assert second.startswith(f"curl -N http://127.0.0.1:{port}/v1/chat/completions ")
    assert '"model": "tekken"' in second
    assert "router  | " in suite.err
    assert "gRPC server listens" in suite.err
    assert "router is ready at" in suite.err
    assert [running.url for running in running_suites()] == [f"http://127.0.0.1:{port}"]
    assert suite.ends(signal.SIGINT) == 0
    assert suite.left(within_s=20) == []
    assert "\x1b[" not in suite.err
    assert suite.err.splitlines()[-1].endswith("| stopped")
    assert running_suites() == []


def test_who_does_not_stop_is_killed_with_its_own_children(start: Start) -> None:
    suite = start(f"router,fake_http,{free_port()},stuck,parent", f"gateway,fake_http,{free_port()}")
    suite.until_ready()
    assert "GRANDCHILD" in suite.err
    began = time.monotonic()
    assert suite.ends(signal.SIGINT) == 0
    assert time.monotonic() - began < 30, "it waited for the grandchild"
    assert suite.left(within_s=20) == []
    assert "router did not stop in time" in suite.err


def test_second_ctrl_c_kills_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILL_AFTER", "600")
    suite = start(f"gateway,fake_http,{free_port()},stuck")
    suite.until_ready()
    suite.process.send_signal(signal.SIGINT)
    suite.until(lambda: "stopping" in suite.err)
    assert suite.ends(signal.SIGINT) == 0
    assert suite.left(within_s=20) == []


def test_child_that_fails_to_start_is_named(start: Start) -> None:
    suite = start(f"router,fake_http,{free_port()},fails", f"gateway,fake_http,{free_port()}")
    assert suite.ends() == 1
    assert "router exited with code 7; stopping the others" in suite.err
    assert suite.err.splitlines()[-1].endswith("| stopped: router exited with code 7: cannot start")
    assert suite.out == ""
    assert suite.left(within_s=20) == []


def test_child_that_dies_later_ends_the_suite(start: Start) -> None:
    port = free_port()
    suite = start(f"worker-0,fake_http,{port},parent", f"gateway,fake_http,{free_port()}")
    suite.until_ready()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"GET /die HTTP/1.0\r\n\r\n")
    assert suite.ends() == 1
    assert "worker-0 exited with code 7" in suite.err
    assert suite.left(within_s=20) == []


def recorded_pid(suite: Suite, name: str) -> int:
    """The process id that other commands see."""
    [running] = [running for running in running_suites() if running.pid == suite.process.pid]
    suite.remember()
    return int(next(process["pid"] for process in running.processes if process["name"] == name))


def die(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"GET /die HTTP/1.0\r\n\r\n")


def serves(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def test_with_restart_a_child_that_dies_is_started_again_but_not_for_ever(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTART", "1")
    port = free_port()
    suite = start(f"worker-0,fake_http,{port},parent", f"gateway,fake_http,{free_port()}")
    suite.until_ready()
    for time_again in range(1, MAX_RESTARTS + 1):
        die(port)
        suite.until(lambda: suite.err.count("exited with code 7; restarting it") == time_again)  # noqa: B023
        suite.until(lambda: suite.err.count("worker-0 is ready again after") == time_again)  # noqa: B023
        assert recorded_pid(suite, "worker-0") in {process.pid for process in suite.tree}
    die(port)
    assert suite.ends() == 1
    assert "worker-0 exited with code 7; stopping the others" in suite.err
    assert "| stopped: worker-0 exited with code 7" in suite.err.splitlines()[-1]
    assert running_suites() == []
    assert suite.left(within_s=20) == []


def test_signal_while_a_restart_waits_leaves_no_process_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTART", "1")
    monkeypatch.setenv("PAUSE", "600")
    port = free_port()
    suite = start(f"worker-0,fake_http,{port}", f"gateway,fake_http,{free_port()}")
    suite.until_ready()
    die(port)
    suite.until(lambda: "worker-0 is ready again" in suite.err)
    die(port)
    suite.until(lambda: "restarting it in 8 s" in suite.err)
    assert suite.ends(signal.SIGINT) == 0
    assert suite.left(within_s=20) == []


def test_with_restart_a_child_that_cannot_start_still_ends_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTART", "1")
    suite = start(f"router,fake_http,{free_port()},fails", f"gateway,fake_http,{free_port()}")
    assert suite.ends() == 1
    assert "restarting it" not in suite.err


def test_taken_port_is_named_before_anything_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        suite = start(f"router,fake_http,{free_port()}", f"postprocess,fake_http,{port}")
        assert suite.ends() == 1
    assert suite.err == (
        f"sluice up: postprocess cannot listen on 127.0.0.1:{port}: the port is taken. "
        'Choose others with --port and --base-grpc-port (with make: make run ARGS="--port 8080").\n'
    )


def test_children_do_not_outlive_a_supervisor_that_was_killed(start: Start) -> None:
    suite = start(
        f"router,fake_http,{free_port()}",
        f"worker-0,fake_http,{free_port()},stuck,parent",
        f"gateway,fake_http,{free_port()}",
    )
    suite.until_ready()
    assert len(suite.tree) == 4
    assert suite.ends(signal.SIGKILL) == -signal.SIGKILL
    assert suite.left(within_s=20) == []


def test_says_whom_it_waits_for_and_why(start: Start) -> None:
    suite = start(f"router,fake_http,{free_port()},never", f"gateway,fake_http,{free_port()}")
    suite.until(lambda: "waiting for router: Redis cannot be reached" in suite.err)
    assert suite.process.poll() is None
    assert suite.out == ""
    assert suite.ends(signal.SIGINT) == 0
    assert suite.left(within_s=20) == []


def test_child_whose_parent_is_already_gone_never_starts(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "late.py").write_text(f"open({str(ran)!r}, 'w').close()")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    command = [sys.executable, "-P", "-m", "sluice.cli.up.child"]
    assert subprocess.run([*command, gone.stdout.decode().strip(), "late"], env=environment).returncode == 1
    assert not ran.exists()
    assert subprocess.run([*command, str(os.getpid()), "late"], env=environment).returncode == 0
    assert ran.exists()


def test_folder_named_like_ours_does_not_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit(9)")
    (tmp_path / "mine.py").write_text("import services.common, theirs")
    (tmp_path / "theirs.py").write_text("")
    command = [sys.executable, "-P", "-m", "sluice.cli.up.child", str(os.getpid()), "mine"]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
