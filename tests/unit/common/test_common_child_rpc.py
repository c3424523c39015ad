"""The framing, the launcher and the fork server of child processes; their users' tests cover limits and blame."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.child_rpc.fork_server import ForkServer
from services.common.child_rpc.framing import FrameReader, frame
from services.common.child_rpc.process import Child, bare_environment, engine_command

SERVICES = Path(__file__).resolve().parents[3] / "services"

# A module of `services` that a child imports from a folder of its own.
ECHO = """
import os, sys, types
services = types.ModuleType("services"); services.__path__ = [sys.argv[1]]; sys.modules["services"] = services
from services.common.child_rpc.child import Channel, ForkedService, ChildLimits, serve, serve_forks
def handle(request):
    if request == b"fds":
        return " ".join(sorted(os.listdir("/proc/self/fd"), key=int)).encode()
    if request == b"grow":
        try:
            return str(len(bytearray(1 << 30))).encode()
        except MemoryError:
            return b"limited"
    if request == b"hang":
        while True:
            pass
    print("noise")
    return os.environ.get(request.decode(), "").encode()
class Service(ForkedService):
    def __init__(self, single):
        super().__init__(ChildLimits(memory_mb=64, alarm_s=0.2, files=16))
        self.single = single
    def prepare(self, request): return {"error": "refused"} if request == b"n" else {"request": request.decode()}
    def handle(self, request): return handle(request)
if sys.argv[2] == "direct":
    channel = Channel.of_stdio()
    serve(channel, handle, is_last=lambda reply: not reply)
else:
    import socket
    serve_forks(socket.socket(fileno=int(sys.argv[3])), Service(sys.argv[2] == "single"))
"""


def command(mode: str, control: int = 0) -> list[str]:
    return [sys.executable, "-c", ECHO, str(SERVICES), mode, str(control)]


async def asked(child: Child, request: bytes) -> bytes:
    child.send(request)
    return await asyncio.wait_for(child.receive(), 30)


def test_frames_are_split_however_the_bytes_arrive() -> None:
    bodies = [b"", b"a", b"b" * 1000]
    sent = b"".join(map(frame, bodies))
    for size in (1, 3, 7, len(sent)):
        reader = FrameReader(1000)
        pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
        assert [body for piece in pieces for body in reader.feed(piece)] == bodies


def test_frame_over_the_limit_is_refused_before_its_body_arrives() -> None:
    with pytest.raises(ValueError, match="1001 bytes"):
        list(FrameReader(1000).feed(frame(b"x" * 1001)[:4]))


def test_child_side_imports_without_third_party_packages() -> None:
    code = (
        "import sys, types; services = types.ModuleType('services'); services.__path__ = [sys.argv[1]]; "
        "sys.modules['services'] = services; import services.common.child_rpc.child"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(SERVICES)], check=True, timeout=60)


def test_engine_command_names_the_interpreter_and_the_module() -> None:
    python, *options, services, module, first = engine_command("/opt/python", "services.a.b", 1)
    assert (python, services, module, first) == ("/opt/python", str(SERVICES), "services.a.b", "1")
    assert "-P" in options


async def test_launched_child_answers_and_ends_with_its_environment_only() -> None:
    child = await Child.launch(command("direct"), 1000, {**bare_environment(), "GIVEN": "yes"})
    assert await asked(child, b"GIVEN") == b"yes"
    assert await asked(child, b"HOME") == b"", "an empty reply is the last one of this child"
    with pytest.raises(EOFError):
        await asked(child, b"GIVEN")
    await child.end()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_child_that_announces_too_large_a_frame_is_lost() -> None:
    child = await Child.launch(command("direct"), 2)
    lost = asyncio.Event()
    child.on_lost = lost.set
    child.send(b"PATH")
    await asyncio.wait_for(lost.wait(), 30)
    await child.end()


@pytest.mark.parametrize("single", [False, True])
async def test_forks_are_limited_and_have_no_other_descriptors(single: bool) -> None:
    server = ForkServer(
        lambda control: command("single" if single else "many", control), 1 << 20, 30, single=single, quiet=True
    )
    first, greeting = await server.fork(b"1")
    assert first is not None
    assert (greeting["request"], greeting["pid"]) == ("1", first.pid)
    assert await asked(first, b"grow") == b"limited"
    # Standard streams, the connection and its two copies, and the listing itself; in some order.
    assert len((await asked(first, b"fds")).split()) == 3 + 3 + 1
    refused, greeting = await server.fork(b"n")
    assert (refused, greeting) == (None, {"error": "refused"})
    second, _ = await server.fork(b"2")
    assert second is not None
    if single:
        with pytest.raises(EOFError):
            await asked(first, b"HOME")
    else:
        await asked(first, b"HOME")
    with pytest.raises(EOFError):
        await asked(second, b"hang")  # its alarm ends it
    for child in (first, second):
        await child.end()
    await server.close()
