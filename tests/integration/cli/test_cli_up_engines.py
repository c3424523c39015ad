"""`sluice up --engines` with servers that speak vLLM's and SGLang's HTTP, while the file changes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_http_engines import BLOCK, FakeServer, FakeSglang, FakeVllm, served
from tests.support.fakes.fake_kubernetes import FakeKubernetes, endpoint, endpoint_slice
from tests.support.fakes.fake_vllm import FakeVllm as GrpcVllm
from tests.support.fakes.fake_vllm import fake_vllm
from tests.support.servers.engine_file_suite import EngineFileSuite, up_with_engines

PROMPTS = [range(first, first + 4 * BLOCK + 3) for first in (0, 50, 100, 150)]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[EngineFileSuite, FakeServer, FakeServer]]:
    root = str(build_tiny_model(folder / "tiny"))
    first, second = FakeVllm(root), FakeSglang(root)
    async with served(first) as first_url, served(second) as second_url:
        engines = {"first": {"url": first_url}, "second": {"url": second_url}}
        async with up_with_engines(folder, engines, BLOCK) as suite:
            await suite.until_workers(2)
            workers = await suite.workers()
            assert {name: f"http://{worker.http_address}" for name, worker in workers.items()} == {
                "first": first_url,
                "second": second_url,
            }
            yield suite, first, second


async def test_up_with_engines_routes_repeated_prompts_together_and_follows_its_file(tmp_path: Path) -> None:
    async with running(tmp_path) as (suite, first, second):
        for server in (first, second):
            server.bodies.clear()
        for prompt in PROMPTS:
            cached = [await suite.cached_tokens(prompt) for _ in range(4)]
            assert cached == [0, *[4 * BLOCK] * 3], "the engine's own usage"
        asked = [{_first(body) for body in server.bodies} for server in (first, second)]
        assert not asked[0] & asked[1], "each prompt went to one engine only"
        assert asked[0] | asked[1] == {prompt[0] for prompt in PROMPTS}

        suite.file.write_text(suite.file.read_text().replace('"url"', '"ulr"', 1))
        await suite.until(lambda: "engines.yaml:4: ulr is unknown" in suite.log.replace("\n", ""))
        await suite.until_workers(2)

        suite.list("second")
        await suite.until_workers(1)
        first.bodies.clear()
        await suite.complete(PROMPTS[0])
        assert not first.bodies

        suite.list("first", "second")
        await suite.until_workers(2)


async def test_up_with_an_engine_that_fails_restarts_its_worker(tmp_path: Path) -> None:
    async with running(tmp_path) as (suite, first, _):
        first.healthy = False
        await suite.until_workers(1)
        await suite.complete(PROMPTS[0])
        first.healthy = True
        await suite.until_workers(2)


async def test_up_with_engines_of_different_block_sizes_names_both_and_serves_them_with_a_common_one(
    tmp_path: Path,
) -> None:
    root = str(build_tiny_model(tmp_path / "tiny"))
    async with served(FakeVllm(root)) as first_url, served(FakeVllm(root, block=2 * BLOCK)) as second_url:
        engines = {"first": {"url": first_url}, "second": {"url": second_url}}
        async with up_with_engines(tmp_path, engines, 2 * BLOCK) as suite:
            await suite.until_workers(1)
            problem = re.compile(r"blocks of (\d+) tokens .* this worker has (\d+) .*; use the same block size")
            await suite.until(lambda: bool(problem.findall(suite.log)))
            ((held, rejected),) = {(int(one), int(other)) for one, other in problem.findall(suite.log)}
            assert {held, rejected} == {BLOCK, 2 * BLOCK}
            common = [{"name": name, **fields, "block_size": 2 * BLOCK} for name, fields in engines.items()]
            suite.file.write_text(json.dumps(common))
            await suite.until_workers(2)
            for prompt in PROMPTS:
                assert [await suite.cached_tokens(prompt) for _ in range(2)] == [0, 4 * BLOCK]


async def test_up_with_engines_of_kubernetes_follows_the_api_server_and_its_failures(tmp_path: Path) -> None:
    kubernetes = FakeKubernetes()
    with ExitStack() as stack:
        stack.enter_context(kubernetes.serving())
        file = {"kubernetes": {"service": "vllm", "kubeconfig_file": str(kubernetes.kubeconfig(tmp_path))}}
        first, second = FakeVllm(str(build_tiny_model(tmp_path / "tiny"))), FakeVllm(str(tmp_path / "tiny"))
        async with served(first) as first_url, served(second) as second_url:
            listed = [
                endpoint_slice([endpoint("127.0.0.1", name)], int(url.rpartition(":")[2]))
                for name, url in (("vllm-0", first_url), ("vllm-1", second_url))
            ]
            kubernetes.slices = listed[:1]
            async with up_with_engines(tmp_path, file, BLOCK) as suite:
                await suite.until_workers(1)
                kubernetes.slices = listed
                await suite.until_workers(2)
                kubernetes.status = 403
                await suite.until(lambda: "verb list on endpointslices" in " ".join(suite.log.split()))
                stack.close()
                await suite.until(lambda: "cannot be reached" in " ".join(suite.log.split()))
                await suite.until_workers(2)
                kubernetes.status, kubernetes.slices = 200, listed[1:]
                stack.enter_context(kubernetes.serving())
                await suite.until_workers(1)
                assert list(await suite.workers()) == ["vllm-1"]
                await suite.complete(PROMPTS[0])
                assert suite.log.count("cannot be reached") == 1, "a failure is reported once"


async def test_up_with_grpc_servers_routes_by_prefix_and_keeps_no_stale_block_of_a_broken_stream(
    tmp_path: Path,
) -> None:
    root = str(build_tiny_model(tmp_path / "tiny"))
    first, second = (GrpcVllm(model_path=root, block=BLOCK, first_token=100) for _ in range(2))
    async with fake_vllm(first) as (first_address, _), fake_vllm(second) as (second_address, _):
        engines = {"first": {"url": f"grpc://{first_address}"}, "second": {"url": f"grpc://{second_address}"}}
        async with up_with_engines(tmp_path, engines, BLOCK) as suite:
            await suite.until_workers(2)
            workers = await suite.workers()
            assert {worker.engine for worker in workers.values()} == {"vllm-grpc"}
            assert all("kv_events" in worker.card.capabilities for worker in workers.values())
            for server in (first, second):
                server.prompts.clear()  # those of the proof
            for prompt in PROMPTS:
                cached = [await suite.cached_tokens(prompt) for _ in range(3)]
                assert cached == [0, *[4 * BLOCK] * 2], "the engine's own usage"
            asked = [{prompt[0] for prompt in server.prompts} for server in (first, second)]
            assert not asked[0] & asked[1], "each prompt went to one engine only"
            assert asked[0] | asked[1] == {prompt[0] for prompt in PROMPTS}

            holder = first if PROMPTS[0][0] in asked[0] else second
            subscriptions = len(holder.starts)
            holder.break_streams.set()
            await suite.until(lambda: len(holder.starts) > subscriptions)
            holder.clear()
            holder.break_streams.clear()
            await suite.until_index(PROMPTS[0], held=False)
            assert holder.starts[-1] > 0, "resumed by sequence number"
            assert await suite.cached_tokens(PROMPTS[0]) == 0
            assert await suite.cached_tokens(PROMPTS[0]) == 4 * BLOCK


def test_up_with_an_invalid_file_of_engines_names_line_and_field(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("- name: a\n  url: nowhere\n")
    command = [str(Path(sys.executable).with_name("sluice")), "up", "--engines", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "engines.yaml:2: url is 'nowhere', expected http://host:port." in done.stderr.replace("\n", "")


@pytest.mark.parametrize("flag", [("--workers", "3"), ("--engine", "vllm")])
def test_up_with_engines_and_flags_of_own_workers_is_rejected(tmp_path: Path, flag: tuple[str, str]) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("[]")
    command = [str(Path(sys.executable).with_name("sluice")), "up", "--engines", str(file), *flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"remove {flag[0]}" in done.stderr.replace("\n", " ")


def _first(body: dict[str, Any]) -> int:
    """The first token of a generation's prompt."""
    return int((body.get("prompt") or body["input_ids"])[0])
