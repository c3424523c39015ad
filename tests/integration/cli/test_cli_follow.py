"""`sluice follow` with servers that have vLLM's HTTP API, beside a router that runs already."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.net.ports import free_port, free_row
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2
from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_http_engines import FakeVllm, served
from tests.support.fakes.fake_kubernetes import FakeKubernetes, endpoint, endpoint_slice
from tests.support.servers.router_child import RouterChild, router_children

WAIT_S = 60
SLUICE = str(Path(sys.executable).with_name("sluice"))


class Follower:
    """A running `sluice follow`, its router and its list.

    Args:
        lists: content of the list.
    """

    def __init__(self, folder: Path, router: RouterChild, lists: Any) -> None:
        self.file, self._log = folder / "engines.yaml", folder / "follow.log"
        self.file.write_text(json.dumps(lists))
        self.router, self.base_port, self.health_port = router, free_row(4), free_port()
        command = [SLUICE, "follow", "--engines", str(self.file), "--routers", f"127.0.0.1:{router.port}"]
        flags = ["--base-port", str(self.base_port), "--health-listen", f"127.0.0.1:{self.health_port}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, *flags, "--drain-s", "2"], stdout=log, stderr=log)

    @property
    def log(self) -> str:
        """All output so far, in one line."""
        return " ".join(self._log.read_text().split())

    async def workers(self) -> dict[str, router_pb2.WorkerInfo]:
        """The workers as registered at the router, by id."""
        listed = await self.router.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=WAIT_S)
        return {worker.worker_id: worker for worker in listed.workers}

    async def until_workers(self, *names: str) -> None:
        """Waits until exactly these workers are registered."""
        async with asyncio.timeout(WAIT_S):
            while sorted(await self.workers()) != sorted(names):
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.05)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for a condition while the command runs."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.05)

    async def health(self, service: str = "") -> int:
        """The status of its health server."""
        async with open_channel(f"127.0.0.1:{self.health_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await stub.Check(request, timeout=WAIT_S, wait_for_ready=True)
            return int(answer.status)

    async def stop(self) -> int:
        """Ends it by SIGTERM; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, WAIT_S)


@asynccontextmanager
async def following(folder: Path, lists: Any) -> AsyncIterator[Follower]:
    async with router_children(1, folder) as (router,):
        follower = Follower(folder, router, lists)
        try:
            yield follower
        except BaseException as error:
            error.add_note(follower.log[-4_000:])
            raise
        finally:
            if follower.process.poll() is None:
                await follower.stop()


def entries(**urls: str) -> list[Mapping[str, str]]:
    return [{"name": name, "url": url} for name, url in urls.items()]


async def test_follow_registers_listed_engines_and_takes_its_workers_along_when_it_ends(tmp_path: Path) -> None:
    root = str(build_tiny_model(tmp_path / "tiny"))
    async with (
        served(FakeVllm(root)) as first,
        served(FakeVllm(root)) as second,
        following(tmp_path, entries(first=first, second=second)) as follower,
    ):
        await follower.until_workers("first", "second")
        workers = await follower.workers()
        ports = {int(worker.address.rpartition(":")[2]) for worker in workers.values()}
        assert ports == {follower.base_port, follower.base_port + 1}
        assert {worker.engine for worker in workers.values()} == {"vllm-http"}
        assert f"adding the engine first at {first}" in follower.log
        serving = health_pb2.HealthCheckResponse.SERVING
        assert (await follower.health(), await follower.health("live")) == (serving, serving)

        follower.file.write_text(json.dumps(entries(second=second)))
        await follower.until_workers("second")
        follower.file.write_text("- {name: second, ulr: x}")
        await follower.until(lambda: "engines.yaml:1: ulr is unknown" in follower.log)
        await follower.until_workers("second")
        follower.file.write_text(json.dumps(entries(third=first, second=second)))
        await follower.until_workers("second", "third")
        assert (await follower.workers())["third"].address.endswith(f":{follower.base_port}"), "a port is used again"

        children = psutil.Process(follower.process.pid).children(recursive=True)
        assert len(children) == 2
        assert await follower.stop() == 0
        assert not [child for child in children if child.is_running()]
        assert not await follower.workers(), "they have left, instead of being missed"


async def test_follow_starts_the_worker_of_a_server_that_returns_again(tmp_path: Path) -> None:
    server = FakeVllm(str(build_tiny_model(tmp_path / "tiny")))
    async with served(server) as url, following(tmp_path, entries(only=url)) as follower:
        await follower.until_workers("only")
        server.healthy = False
        await follower.until_workers()
        await follower.until(lambda: "restarting it in 1 s" in follower.log)
        server.healthy = True
        await follower.until_workers("only")


async def test_follow_waits_for_an_api_server_that_is_away(tmp_path: Path) -> None:
    kubernetes = FakeKubernetes()
    with kubernetes.serving():
        config = str(kubernetes.kubeconfig(tmp_path))
    lists = {"kubernetes": {"service": "vllm", "kubeconfig_file": config}}
    async with (
        served(FakeVllm(str(build_tiny_model(tmp_path / "tiny")))) as url,
        following(tmp_path, lists) as follower,
    ):
        await follower.until(lambda: "the API server cannot be reached" in follower.log)
        assert await follower.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await follower.health("live") == health_pb2.HealthCheckResponse.SERVING
        with kubernetes.serving():
            await follower.until(lambda: "no EndpointSlice matches" in follower.log)
            assert await follower.health() == health_pb2.HealthCheckResponse.SERVING
            kubernetes.slices = [endpoint_slice([endpoint("127.0.0.1", "vllm-0")], int(url.rpartition(":")[2]))]
            await follower.until_workers("vllm-0")
        assert await follower.stop() == 0


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        ("- {name: a}", (), "engines.yaml:1: url is missing."),
        ("[]", ("--routers", "nowhere"), "--routers is 'nowhere'; expected host:port"),
        ("[]", ("--base-port", "80"), "--base-port must be 0, or between 1024 and"),
        ("[]", ("--health-listen", "x"), "--health-listen is 'x'; expected host:port."),
        ("[]", ("--drain-s", "-1"), "--drain-s must be between 0 and 3600."),
        ("[]", ("--host", ""), "--host must not be empty"),
        ("[]", ("--tls", "absent"), "--tls absent has no worker.pem"),
    ],
)
def test_follow_with_an_invalid_flag_or_list_says_what_to_do(
    tmp_path: Path, content: str, flags: tuple[str, ...], expected: str
) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(content)
    command = [SLUICE, "follow", "--engines", str(file), "--routers", "127.0.0.1:1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert expected in " ".join(done.stderr.split())


async def test_health_server_of_a_running_follower_keeps_its_port(tmp_path: Path) -> None:
    async with following(tmp_path, []) as follower:
        assert await follower.health() == health_pb2.HealthCheckResponse.SERVING
        command = [SLUICE, "follow", "--engines", str(follower.file), "--routers", "127.0.0.1:1"]
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, "--health-listen", f"127.0.0.1:{follower.health_port}"],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 2
        assert "cannot be used; choose another port" in " ".join(done.stderr.split())
