"""The links to postprocess replicas that come and go, in a name service that says so before anybody else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.common.base.tasks import TaskOwner
from services.common.net.ports import free_port
from services.common.rpc import replicas
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.backends.workers import connections as fleet_module
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.states import TextState
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc
from tests.support.servers.survival import Bookings
from tests.support.waiting import until


class Host(postprocess_pb2_grpc.PostprocessServicer):
    """A replica whose sessions stay open."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.server = GrpcServer(GrpcServiceSettings(listen=self.address), postprocess_pb2.DESCRIPTOR)
        self.sessions = 0
        postprocess_pb2_grpc.add_PostprocessServicer_to_server(self, self.server.server)

    async def Session(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
        self.sessions += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("back", [False, True], ids=["for good", "and comes back"])
async def test_a_replica_that_leaves_the_name_service_ends_no_gateway(
    monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    monkeypatch.setattr(replicas, "RESOLVE_EVERY_S", 0.02)
    monkeypatch.setattr(fleet_module, "SWEEP_S", 1.0)
    hosts = [Host(), Host()]  # type: ignore[abstract]  # they have only the call that the test makes
    known = list(hosts)

    async def resolve(target: str) -> list[tuple[str, str]]:
        return [(host.address, "post") for host in known]

    monkeypatch.setattr(replicas, "_resolve", resolve)
    deaths: list[str] = []
    tasks = TaskOwner(on_death=lambda name, error: deaths.append(f"{name}: {error}"))
    stream_manager = StreamManager(4, Bookings(), GatewayMetrics())
    connections = ConnectionManager(["post:1"], None, 5.0, stream_manager, tasks)
    for host in hosts:
        await host.server.start()
        await host.server.set_serving(True)
    try:
        await connections.postprocess.start()
        tasks.spawn(connections.run_sweeps(), "sweeps")
        await until(lambda: sum(link.connected for link in stream_manager.texts.links.values()) == 2)
        leaver = hosts[0]
        known.remove(leaver)
        await leaver.server.set_serving(False)
        await until(lambda: stream_manager.texts.links[leaver.address].retired)
        await asyncio.sleep(0.2)  # ten looks at the name service
        assert stream_manager.texts.links[leaver.address].connected, "what it carries may finish"
        if back:
            known.append(leaver)
            await leaver.server.set_serving(True)
            await until(lambda: not stream_manager.texts.links[leaver.address].retired)
            await asyncio.sleep(1.5)
            assert all(link.connected for link in stream_manager.texts.links.values())
            assert leaver.sessions == 1
        else:
            await until(lambda: leaver.address not in connections.postprocess._replicas)
            assert list(stream_manager.texts.links) == [hosts[1].address]
        assert not deaths
    finally:
        await tasks.close()
        await connections.postprocess.close()
        for host in hosts:
            await host.server.stop(0)


async def test_stream_that_waits_is_opened_by_a_replica_whose_session_was_open_before_it_served_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host()  # type: ignore[abstract]
    opened: list[int] = []
    monkeypatch.setattr(PostLink, "open", lambda link, stream: opened.append(stream.slot))
    tasks = TaskOwner()
    stream_manager = StreamManager(4, Bookings(), GatewayMetrics())
    connections = ConnectionManager([host.address], None, 5.0, stream_manager, tasks)
    await host.server.start()
    await host.server.set_serving(True)
    try:
        await connections.postprocess.start()
        await until(lambda: any(link.connected for link in stream_manager.texts.links.values()))
        [link] = stream_manager.texts.links.values()
        await host.server.set_serving(False)
        await until(lambda: link.retired)
        stream = SimpleNamespace(slot=3, custom_text=None, end=None, post=None)
        stream_manager.texts.open(cast(Any, stream))
        assert (link.connected, stream.text_state, opened) == (True, TextState.WAITING, [])
        await host.server.set_serving(True)
        await until(lambda: opened == [3])
        assert (link.sessions, stream.text_state) == (1, TextState.OPEN)
    finally:
        await tasks.close()
        await connections.postprocess.close()
        await host.server.stop(0)
