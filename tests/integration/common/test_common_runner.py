"""A service process: it stops when asked, fails with one line, and its exit code says which."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

DEADLINE_S = 120

HEAD = """
import asyncio, sys
from services.common.base.errors import unavailable
from services.common.rpc.runner import run
from services.common.base.tasks import Stop
from services.common.settings.service import ServiceSettings
from services.common.base.tasks import TaskOwner
settings = ServiceSettings(log_format="text")
"""


def service(serve: str) -> subprocess.Popen[str]:
    body = f"{HEAD}async def serve(stop: Stop) -> None:\n{textwrap.indent(textwrap.dedent(serve), '    ')}\n"
    return subprocess.Popen(
        [sys.executable, "-c", f"{body}\nrun('toy', settings, serve)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, printed = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, printed


def wait_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_with_0(number: signal.Signals) -> None:
    process = service("print('up', flush=True); await stop.wait(); print('drained', file=sys.stderr)")
    wait_up(process)
    process.send_signal(number)
    code, printed = result(process)
    assert code == 0
    assert "stopping" in printed
    assert "drained" in printed


def test_second_signal_does_not_wait() -> None:
    process = service("print('up', flush=True); await stop.wait(); print('up', flush=True); await asyncio.sleep(600)")
    wait_up(process)
    process.send_signal(signal.SIGTERM)
    wait_up(process)
    process.send_signal(signal.SIGTERM)
    assert result(process)[0] == 130


def test_typed_error_is_one_line_without_a_traceback() -> None:
    code, printed = result(service("raise unavailable('Cannot listen on 127.0.0.1:1.')"))
    assert code == 1
    (line,) = printed.splitlines()
    assert line.endswith("Cannot listen on 127.0.0.1:1.")
    assert "ERROR" in line


def test_misspelt_variables_are_warned_of_without_their_values() -> None:
    command = [sys.executable, "-m", "services.router", "--listen", "none"]
    variables = {"SLUICE_ROUTER_TOKEN_FILE": "/secret", "SLUICE_ROUTER_TOKENS": "secret", "SLUICE_ROUTER_POLICY": "kv"}
    ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    warnings = [line for line in ended.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 2
    assert "SLUICE_ROUTER_TOKENS is not a setting" in warnings[0]
    assert "SLUICE_ROUTER_TOKEN_FILE is not a setting and has no effect" in warnings[1]
    assert "did you mean SLUICE_ROUTER_TOKENS_FILE?" in warnings[1]
    assert "secret" not in ended.stderr


def test_dead_background_task_ends_the_process_as_failed() -> None:
    code, printed = result(
        service(
            """
            async def heartbeat():
                raise ValueError("broken")
            owner = TaskOwner(on_death=stop.fail)
            owner.spawn(heartbeat(), "heartbeat")
            await stop.wait()
            """
        )
    )
    assert code == 1
    assert "heartbeat" in printed


def test_thread_that_hangs_does_not_delay_the_end() -> None:
    process = service(
        """
        import threading
        threading.Thread(target=threading.Event().wait).start()
        """
    )
    assert result(process)[0] == 0
