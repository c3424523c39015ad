"""Free ports: they have no listener, the kernel gives them to no other socket, and no other process of ours."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from services.common.net import ports

TAKE = "import sys; from services.common.net.ports import free_port; print(*[free_port() for _ in range({})]); input()"


def test_problems_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ports.problem("127.0.0.1", port) == "the port is taken"
    assert ports.problem("127.0.0.1", port) == ""
    assert ports.problem("192.0.2.1", port) == "the address is not one of this machine"
    assert ports.problem("not a host", port) == "the host name cannot be resolved"


def test_they_are_free_and_differ() -> None:
    taken = [ports.free_port() for _ in range(50)]
    assert len(set(taken)) == 50
    assert not any(ports.problem("127.0.0.1", port) for port in taken)


def test_no_outgoing_connection_of_this_machine_takes_one_of_them() -> None:
    assert ports.FREE_RANGE.stop <= 32_768, "Linux takes them from here up, unless it is told otherwise"


def test_a_row_is_in_a_row() -> None:
    first, second = ports.free_row(8), ports.free_row(8)
    assert not set(range(first, first + 8)) & set(range(second, second + 8))


def test_a_row_goes_around_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_row(8)
    monkeypatch.setattr(ports, "FREE_RANGE", range(first - 1, first + 4))
    with pytest.raises(OSError, match="no 4 consecutive ports are free"):
        ports.free_row(4)


def test_two_processes_never_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither listens yet: what one was given is the other's no more, until it ends."""
    first = ports.free_row(30)
    around = range(first, first + 200)
    monkeypatch.setattr(ports, "FREE_RANGE", around)
    ranged = f"from services.common.net import ports; ports.FREE_RANGE = range({around.start}, {around.stop}); " + TAKE
    command = [sys.executable, "-c", ranged.format(15)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        assert len(theirs) == 15
        assert theirs <= set(around)
        assert not theirs & set(range(first, first + 30))
        ours = {ports.free_port() for _ in range(10)}
        assert not ours & theirs
        other.communicate("\n", timeout=20)
