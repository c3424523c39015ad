"""`python -m services.worker` as a process: it starts, says what is wrong, and ends when told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.worker.engines.mock.faults import CRASH_CODE
from sluice.v1 import worker_pb2_grpc
from tests.support.oracles.tracebacks import complaints
from tests.support.servers.workers import Caller, generation

DEADLINE_S = 60


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The service as a child, never left behind."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.worker",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "SLUICE_WORKER_LOG_FORMAT": "text"},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def line_with(child: asyncio.subprocess.Process, text: str) -> str:
    assert child.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        while line := (await child.stderr.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"the worker ended without saying {text!r}")


async def output(child: asyncio.subprocess.Process) -> tuple[int, str, str]:
    async with asyncio.timeout(DEADLINE_S):
        out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def test_it_serves_and_ends_with_zero_on_sigterm(folder: Path) -> None:
    listen = ("--listen", "127.0.0.1:0", "--model", f"tiny={folder}", "--speedup", "100", "--grace-s", "0")
    async with process(*listen) as child:
        line = await line_with(child, "gRPC server listens")
        port = line.split("address=127.0.0.1:")[1].split()[0]
        await line_with(child, "engine is ready")
        channel = open_channel(f"127.0.0.1:{port}")
        try:
            health = health_pb2_grpc.HealthStub(channel)
            caller = Caller(worker_pb2_grpc.WorkerStub(channel))
            await caller.send({1: generation("a")})
            await caller.ended(1)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="sluice.v1.Worker"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await caller.send({2: generation("b", max_tokens=30, ignore_eos=True)})
            await caller.began(2)
            child.send_signal(signal.SIGTERM)
            await caller.ended(2)
            assert len(caller.token_ids[2]) == 30
            await caller.close()
        finally:
            await channel.close()
        code, _, errors = await output(child)
    assert code == 0
    assert complaints(errors) == [], errors


async def test_help_lists_the_settings() -> None:
    async with process("--help") as child:
        code, text, _ = await output(child)
    assert code == 0
    for flag in ("--engine", "--model", "--routers", "--speedup", "--block-size", "--advertise", "--drain-s"):
        assert flag in text


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--speedup", "0"), 2, "speedup"),
        (("--model", "x=y@nothing"), 2, "processor"),
        (("--engine", "warp"), 1, "mock"),
        (("--role", "router"), 2, "role"),
        (("--engine-args", "fault=earthquake"), 1, "error_after"),
        (("--engine-args", "timing=table,timing_file=./no/such/file"), 1, "cannot be read"),
        (("--total-blocks", "900000000000"), 1, "Not enough memory"),
        (("--engine-args", "x=1"), 1, "has no option 'x'"),
        (("--model", "tiny=./no/such/folder"), 1, "does not exist"),
    ],
)
async def test_what_is_wrong_is_one_sentence(arguments: tuple[str, ...], code: int, said: str) -> None:
    async with process("--listen", "127.0.0.1:0", *arguments) as child:
        ended, _, errors = await output(child)
    assert ended == code
    assert said in errors
    assert "Traceback" not in errors


async def test_an_injected_crash_is_like_kill_minus_nine(folder: Path) -> None:
    crash = ("--engine-args", "fault=crash=3")
    flags = ("--listen", "127.0.0.1:0", "--model", f"tiny={folder}", "--speedup", "100", *crash)
    async with process(*flags) as child:
        line = await line_with(child, "gRPC server listens")
        await line_with(child, "engine is ready")
        channel = open_channel(f"127.0.0.1:{line.split('address=127.0.0.1:')[1].split()[0]}")
        try:
            call = worker_pb2_grpc.WorkerStub(channel).Generate(generation("doomed", ignore_eos=True))
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
        finally:
            await channel.close()
        code, _, errors = await output(child)
    assert code == CRASH_CODE
    assert "Traceback" not in errors


async def test_a_second_signal_ends_at_once(folder: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--model", f"tiny={folder}", "--engine-args", "fault=hang", "--drain-s", "600")
    async with process(*flags) as child:
        line = await line_with(child, "gRPC server listens")
        await line_with(child, "engine is ready")
        channel = open_channel(f"127.0.0.1:{line.split('address=127.0.0.1:')[1].split()[0]}")
        try:
            caller = Caller(worker_pb2_grpc.WorkerStub(channel))
            await caller.send({1: generation("stuck"), 2: generation("")})
            await caller.ended(2)  # so the first one is there as well
            child.send_signal(signal.SIGTERM)
            await line_with(child, "stopping")
            child.send_signal(signal.SIGTERM)
            code, _, _ = await output(child)
            await caller.close()
        finally:
            await channel.close()
    assert code == 130


async def test_sluice_worker_is_the_same_process(folder: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", "worker", "--engine", "mock", "--listen", "127.0.0.1:0"),
        *("--model", f"tiny={folder}", "--", "--no-such-flag"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    code, _, errors = await output(child)
    assert code == 1
    assert "accepts no options after --" in errors


async def test_its_endpoint_says_how_it_is_and_has_the_engines_metrics(folder: Path) -> None:
    metrics = f"http://127.0.0.1:{free_port()}"
    flags = ("--listen", "127.0.0.1:0", "--model", f"tiny={folder}", "--speedup", "100", "--worker-id", "seen")
    async with (
        process(*flags, "--metrics-listen", metrics.removeprefix("http://")) as child,
        httpx.AsyncClient() as web,
    ):
        said: list[dict[str, str]] = []
        async with asyncio.timeout(DEADLINE_S):
            while not said or said[-1]["status"] != "ok":
                try:
                    answer = await web.get(f"{metrics}/health")
                except httpx.TransportError:
                    await asyncio.sleep(0.005)
                    continue
                said.append(answer.json())
                assert answer.status_code == (200 if said[-1]["status"] == "ok" else 503)
        assert said[-1]["worker_id"] == "seen"
        assert said[-1]["phase"] == ""
        assert {one["status"] for one in said} <= {"waiting", "ok"}, said
        line = await line_with(child, "gRPC server listens")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{line.split('address=127.0.0.1:')[1].split()[0]}") as channel:
            caller = Caller(worker_pb2_grpc.WorkerStub(channel))
            await caller.send({1: generation("a", max_tokens=30, ignore_eos=True)})
            await caller.ended(1)
            await caller.close()
        text = (await web.get(f"{metrics}/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert float(values["mock_engine_output_tokens_total"]) >= 30
    assert float(values["mock_engine_steps_total"]) >= 30
    assert float(values['sluice_worker_requests_total{reason="length"}']) == 1
