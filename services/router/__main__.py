"""Starts the router: `python -m services.router`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from services.common.intake.pace import BodyPace
from services.common.rpc.server import GrpcServer
from services.common.runner import run
from services.common.security.tls import channel_credentials
from services.common.tasks import Stop, TaskOwner
from services.router.http_api.server import http_server
from services.router.messages.workers import read_report
from services.router.preprocess_client import PreprocessBodies
from services.router.reservations.cost import CostModel
from services.router.router import Router, RouterConfig
from services.router.scheduling.body_intake import openai_bodies, shared_pace
from services.router.scheduling.disaggregation import DisaggRules
from services.router.scheduling.policies.config import NO_POLICIES, read_policies
from services.router.scheduling.policies.registry import ComposedPolicies
from services.router.scheduling.selection import Thresholds
from services.router.service import RouterService
from services.router.settings import RouterSettings
from services.router.store.base import Store
from services.router.store.memory import MemoryStore
from services.router.sync.reservation_owners import OWNER_KEEPALIVE_MS
from sluice.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from services.router.picker.bootstrap import PickerServers

log = logging.getLogger(__name__)


def make_store(settings: RouterSettings) -> Store:
    """Returns the store selected by the settings; raises SluiceError for an invalid Redis URL."""
    url = settings.redis_url.get_secret_value()
    if not url:
        return MemoryStore()
    from services.router.store.redis import RedisStore

    return RedisStore(url, settings.redis_prefix, settings.redis_timeout_s, credentials=settings.redis_credentials)


def make_config(settings: RouterSettings) -> RouterConfig:
    """Returns the router configuration from the settings."""
    return RouterConfig(
        policy=settings.policy,
        lease_ms=settings.lease_ms,
        reservation_ttl_ms=int(settings.reservation_ttl_s * 1000),
        owner_lease_ms=settings.owner_lease_ms,
        thresholds=Thresholds(settings.busy_kv_share, settings.busy_prefill_tokens, settings.busy_requests),
        wait_ms=settings.wait_ms,
        wait_for_workers_ms=settings.wait_for_workers_ms,
        models=frozenset(settings.models),
        disagg=DisaggRules(
            settings.wait_for_prefill,
            settings.enforce_disagg,
            bypass_uncached_tokens=settings.bypass_uncached_tokens,
        ),
    )


def make_bodies(settings: RouterSettings, pace: BodyPace) -> PreprocessBodies | None:
    """Returns the client of the configured preprocess service, or None."""
    if not settings.preprocess:
        return None
    intake = openai_bodies(pace)
    credentials = channel_credentials(settings)
    return PreprocessBodies(settings.preprocess, credentials, max_pause_s=settings.session_pause_s, intake=intake)


def make_policies(settings: RouterSettings, stop: Stop) -> ComposedPolicies:
    """Returns the policies of the policy file; raises SluiceError for the first mistake in it."""
    file = NO_POLICIES if settings.policies is None else read_policies(settings.policies)
    return ComposedPolicies(file, on_death=stop.fail)


def make_picker(
    settings: RouterSettings, router: Router, cost: CostModel, tasks: TaskOwner, pace: BodyPace
) -> PickerServers | None:
    """Returns the endpoint picker, or None if the settings have none."""
    if not settings.picker_listen:
        return None
    from services.router.picker.bootstrap import PickerServers

    return PickerServers(settings, router, cost, tasks, pace)


async def serve(settings: RouterSettings, stop: Stop, on_listening: asyncio.Future[int] | None = None) -> None:
    """Serves until `stop` is set; `on_listening` receives the port."""
    pace = shared_pace()
    bodies = make_bodies(settings, pace)
    policies = make_policies(settings, stop)
    await policies.start()
    router = Router(
        make_store(settings),
        make_config(settings),
        on_death=stop.fail,
        read_report=read_report,
        bodies=bodies,
        policies=policies,
    )
    cost = CostModel(
        prefill_load_scale=settings.prefill_load_scale,
        temperature=settings.temperature,
    )
    service = RouterService(router, cost, settings.session_pause_s)
    tasks = TaskOwner(stop.fail)
    picker = make_picker(settings, router, cost, tasks, pace)
    http = http_server(settings, router, service, pace, stop.fail)
    server = GrpcServer(settings, router_pb2.DESCRIPTOR, keepalive_ms=OWNER_KEEPALIVE_MS)
    router_pb2_grpc.add_RouterServicer_to_server(service, server.server)
    if bodies is not None:
        await bodies.start()
    await server.start()
    if picker is not None:
        await picker.start()
    router.start()
    if http is not None:
        http.start()
    if on_listening is not None:
        on_listening.set_result(server.port)
    waits = {asyncio.ensure_future(router.ready.wait()), asyncio.ensure_future(stop.wait())}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if not stop.is_set():
        await server.set_serving(True)
        if picker is not None:
            await picker.serve()
        log.info("router is ready", extra={"store": "redis" if settings.redis_url.get_secret_value() else "memory"})
    await stop.wait()
    await server.set_serving(False)
    if picker is not None:
        await picker.announce_stop()
    service.stop()
    if http is not None:
        await http.stop()
    drains = [server.stop(settings.drain_s)]
    if picker is not None:
        drains.append(picker.stop(settings.drain_s))
    await asyncio.gather(*drains)
    await tasks.close()
    await router.close()
    await policies.close()
    if bodies is not None:
        await bodies.close()


def main() -> None:
    """Runs the router as a process."""
    settings = RouterSettings.load()
    run("router", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
