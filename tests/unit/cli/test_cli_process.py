"""What the supervisor reads from its children."""

from __future__ import annotations

import logging
import signal

import pytest

from services.common import logs
from sluice.cli.up.process import complaint, exit_words
from sluice.cli.up.ready import reachable
from sluice.cli.up.supervisor import Restarts


def record(level: int) -> logging.LogRecord:
    made = logging.LogRecord("services.router", level, __file__, 1, "Redis is away", None, None)
    made.attempt = 3
    return made


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter("router")])
@pytest.mark.parametrize(("level", "found"), [(logging.WARNING, True), (logging.ERROR, True), (logging.INFO, False)])
def test_warnings_are_recognised_in_both_log_formats(formatter: logging.Formatter, level: int, found: bool) -> None:
    assert complaint(formatter.format(record(level))) == ("Redis is away" if found else "")


@pytest.mark.parametrize("line", ["", "{", '{"level": 3}', "Traceback (most recent call last):", "WARNING: beware"])
def test_other_lines_are_no_complaints(line: str) -> None:
    assert complaint(line) == ""


def test_exit_words() -> None:
    assert exit_words(3) == "exited with code 3"
    assert exit_words(-signal.SIGKILL) == "was killed by SIGKILL"
    assert exit_words(-250) == "was killed by signal 250"


def test_wildcard_hosts_are_reached_through_loopback() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]


def test_restart_allowance_is_per_process_and_recovers() -> None:
    now = 100.0
    restarts = Restarts(most=2, within_s=60, clock=lambda: now)
    assert [restarts.allow("worker-0") for _ in range(3)] == [True, True, False]
    assert restarts.allow("worker-1")
    now += 59
    assert not restarts.allow("worker-0")
    now += 2
    assert [restarts.allow("worker-0") for _ in range(3)] == [True, True, False]


def test_none_at_all() -> None:
    assert not Restarts(most=0).allow("worker-0")
