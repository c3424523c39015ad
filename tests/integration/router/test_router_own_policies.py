"""The example's stages: built as a wheel, found by their entry points, and used by routers over gRPC."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.router import __main__ as router_process
from services.router.scheduling.policies.registry import ComposedPolicies
from sluice.v1 import router_pb2
from tests.support.clients.callers import prompt, query, refused
from tests.support.repository import ROOT
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_cluster import FakeWorker, RouterProcess, routers
from tests.support.waiting import until

EXAMPLE = ROOT / "examples" / "policies"
DEADLINE_S = 120


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, made without the network."""
    work = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(source))
    (wheel,) = work.glob("sluice_pools-*.whl")
    pip("install", "--no-deps", "--target", str(work / "site"), str(wheel))
    return work / "site"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments[:1], "--no-index", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def attach(replicas: list[RouterProcess], *names: str) -> None:
    for replica in replicas:
        await replica.ready()
    for name in names:
        worker = FakeWorker(name)
        await worker.attach(replicas[0])
        worker.keep_beating()
    for replica in replicas:

        async def knows(stub: Any = replica.stub) -> bool:
            return len((await stub.ListWorkers(router_pb2.ListWorkersRequest())).workers) == len(names)

        await until(knows)


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "memory":
        return {}
    server: RedisServer = request.getfixturevalue("redis")
    return {"redis_url": server.url, "redis_timeout_s": 10}


@pytest.fixture
def found(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(router_process, "ComposedPolicies", partial(ComposedPolicies, timeout_s=10.0))


@pytest.mark.usefixtures("found")
async def test_installed_stages_route_each_tenant_to_its_pool_within_the_limits(store: dict[str, Any]) -> None:
    replicas = 2 if store else 1
    settings = {
        "policies": EXAMPLE / "policies.yaml",
        "busy_requests": 3,
        "drain_s": 5,
        "lease_ms": 60_000,
    }
    async with routers(replicas, **settings, **store) as made:
        await attach(made, "acme-0", "acme-1", "common-0")

        async def ask(number: int, tenant: str) -> router_pb2.RouteQueryResponse | str:
            request = query(prompt(*range(64)), f"{tenant}-{number}", headers={"X-Tenant": tenant})
            call = made[number % replicas].stub.RouteQuery(request)
            try:
                return await call
            except Exception:
                return (await refused(call)).code

        answers = await asyncio.gather(*(ask(number, "acme") for number in range(10)))
        routed = [answer for answer in answers if not isinstance(answer, str)]
        assert [answer for answer in answers if isinstance(answer, str)] == ["overloaded"] * 4
        assert {answer.decode.worker_id for answer in routed} == {"acme-0", "acme-1"}
        assert {answer.degraded for answer in routed} == {""}
        other = await ask(0, "unknown")
        assert not isinstance(other, str)
        assert other.decode.worker_id == "common-0"
        loads = (await made[0].stub.GetLoads(router_pb2.GetLoadsRequest())).loads
        assert {load.worker_id: load.requests for load in loads} == {"acme-0": 3, "acme-1": 3, "common-0": 1}


@pytest.mark.usefixtures("found")
async def test_installed_picker_keeps_sessions_together_on_every_replica(redis: RedisServer) -> None:
    settings = {"policies": EXAMPLE / "policies.yaml", "drain_s": 5, "lease_ms": 60_000}
    async with routers(2, redis_url=redis.url, redis_timeout_s=10, **settings) as made:
        await attach(made, *(f"w{n}" for n in range(5)))
        for session in ("one", "two", "three"):
            requests = [query(prompt(n), policy="sticky", session_id=session, explain=True) for n in range(6)]
            answers = [await made[n % 2].stub.RouteQuery(each) for n, each in enumerate(requests)]
            assert len({answer.decode.worker_id for answer in answers}) == 1
            assert {answer.degraded for answer in answers} == {""}
            assert all(score.policy_score == 1 for score in answers[0].scores)


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        (
            ("name: tenant_pool", "name: tenant_pol"),
            4,
            "unknown filter 'tenant_pol'; use one of capability, free_blocks, label,",
        ),
        (("header: x-tenant", "header: X-Tenant"), 6, "header must be a name in lower case, not 'X-Tenant'"),
        (("shared: common", "share: common"), 5, "the parameters of tenant_pool are: header, shared"),
        (("picker: sticky", "picker: free_blocks"), 19, "it is not a picker:"),
        (("weight: 3", "weight: heavy"), 10, "weight must be a number"),
    ],
)
def test_router_with_a_mistake_in_its_policy_file_exits_and_names_the_line(
    site: Path, tmp_path: Path, change: tuple[str, str], line: int, message: str
) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text((EXAMPLE / "policies.yaml").read_text().replace(*change))
    done = subprocess.run(
        [sys.executable, "-m", "services.router", "--listen", "127.0.0.1:0", "--policies", str(path)],
        env={"PYTHONPATH": f"{site}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode != 0
    assert f"policies.yaml, line {line}: policies." in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


async def test_label_filter_keeps_requests_in_their_zone(tmp_path: Path, store: dict[str, Any]) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text(
        "policies:\n  zones:\n    filters:\n      - {name: label, parameters: {name: zone, header: x-zone}}\n"
        "default: zones\n"
    )
    replicas = 2 if store else 1
    async with routers(replicas, policies=path, drain_s=5, lease_ms=60_000, **store) as made:
        for replica in made:
            await replica.ready()
        for number, zone in enumerate(("east", "west", "")):
            worker = FakeWorker(f"w{number}")
            worker.registration.labels.update({"zone": zone} if zone else {})
            await worker.attach(made[0])
            worker.keep_beating()
        for replica in made:

            async def knows(stub: Any = replica.stub) -> bool:
                return len((await stub.ListWorkers(router_pb2.ListWorkersRequest())).workers) == 3

            await replica.ready()
            await until(knows)
            listed = (await replica.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
            assert [dict(worker.labels) for worker in listed] == [{"zone": "east"}, {"zone": "west"}, {}]
            for zone, expected in (("east", "w0"), ("west", "w1")):
                answers = [await replica.stub.RouteQuery(query(prompt(n), headers={"x-zone": zone})) for n in range(4)]
                assert {answer.decode.worker_id for answer in answers} == {expected}
            error = await refused(replica.stub.RouteQuery(query(prompt(1), headers={"x-zone": "north"})))
            assert error.code == "workers_excluded"


@pytest.mark.parametrize("labels", [{"": "x"}, {"a": "x" * 64}, {"a\n": "x"}, {f"n{n}": "x" for n in range(33)}])
async def test_registration_with_wrong_labels_is_rejected(labels: dict[str, str]) -> None:
    async with routers(drain_s=2) as (router,):
        await router.ready()
        worker = FakeWorker("w")
        worker.registration.labels.update(labels)
        call = router.stub.Attach()
        await call.write(router_pb2.AttachRequest(registration=worker.registration))
        assert (await refused(call.read())).param == "registration.labels"
