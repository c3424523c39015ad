"""Servers of a router process that are extensions: those of other packages, and a tree from which one is deleted."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import sys
import tomllib
from pathlib import Path

import grpc
import pytest

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.repository import ROOT
from tests.support.servers.router_cluster import routers
from tests.support.waiting import until

GROUP = "sluice.router_servers"
FOLDERS = {"http": "http_api", "picker": "picker"}
RECORDER = """
calls = []
class Server:
    def __init__(self, running):
        calls.append(running.settings.listen)
    async def start(self):
        calls.append("start")
    async def set_serving(self, serving):
        calls.append(serving)
    async def stop(self, grace_s):
        calls.append("stop")
"""


def tree_without(name: str, folder: Path) -> Path:
    """Returns a copy of the services in which the folder of a server and its entry point are deleted."""
    for top in ("services", "sluice"):
        shutil.copytree(ROOT / top, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "services/router" / FOLDERS[name])
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    del points[name]
    write_metadata(folder, "sluice-llm", points)
    return folder


def write_metadata(folder: Path, package: str, points: dict[str, str]) -> None:
    """Writes what pip writes about an installed package."""
    metadata = folder / f"{package.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")


def install(folder: Path, package: str, name: str, code: str) -> None:
    """Writes an installed package with one server."""
    (folder / f"{package}_code.py").write_text(code)
    write_metadata(folder, package, {name: f"{package}_code:Server"})
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", FOLDERS)
async def test_router_whose_folder_of_a_server_is_deleted_answers_and_logs_what_it_lacks(
    name: str, tmp_path: Path
) -> None:
    tree, port, log = tree_without(name, tmp_path / "tree"), free_port(), tmp_path / "log"
    flags = ["--listen", f"127.0.0.1:{port}", "--metrics-listen", "", f"--{name}-listen", f"127.0.0.1:{free_port()}"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with log.open("wb") as output:
        command = [sys.executable, "-m", "services.router", *flags]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tree, env=environment, stdout=output, stderr=output
        )
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            request = router_pb2.RouteQueryRequest(model="m", mode=router_pb2.RouteQueryRequest.MODE_QUERY_ONLY)
            with pytest.raises(grpc.aio.AioRpcError, match="No worker serves model 'm' at the moment"):
                await stub.RouteQuery(request, timeout=60, wait_for_ready=True)
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)
    sentence = f"--{name}-listen is set, but no installed package has this server; run: pip install sluice-llm."
    assert sentence in log.read_text()
    assert "Traceback" not in log.read_text()
    assert process.returncode == 0


async def test_server_of_another_package_runs_with_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "other", "own", RECORDER)
    async with routers(drain_s=0):
        calls = importlib.import_module("other_code").calls
        await until(lambda: True in calls)
    assert calls == ["127.0.0.1:0", "start", True, False, "stop"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import absent_package\n", "the module absent_package is not installed; run: pip install broken"),
        ("raise RuntimeError('no device')\n", "importing it raised RuntimeError: no device"),
    ],
)
async def test_server_that_cannot_be_imported_is_left_out_with_a_sentence(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "broken", "own", code)
    async with routers(drain_s=0) as (router,):
        await router.ready()
    assert f"Extension own of broken cannot be loaded: {reason}." in caplog.text


async def test_server_that_two_packages_register_is_left_out_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("one", "two"):
        install(tmp_path, package, "own", RECORDER)
    async with routers(drain_s=0) as (router,):
        await router.ready()
    assert "Extension own is registered 2 times, by one and two: uninstall all but one." in caplog.text
