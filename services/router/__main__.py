"""Starts the router: `python -m services.router`."""

from __future__ import annotations

import asyncio
import logging

from services.common.base.tasks import Stop
from services.common.net.intake.pace import BodyPace
from services.common.rpc.runner import run
from services.common.rpc.server import GrpcServer
from services.common.security.tls import channel_credentials
from services.router.router import Router, RouterConfig
from services.router.rpc.preprocess import PreprocessBodies
from services.router.rpc.service import RouterService
from services.router.rpc.workers import read_report
from services.router.scheduling.body_intake import openai_bodies, shared_pace
from services.router.scheduling.disaggregation import DisaggRules
from services.router.scheduling.policies.config import NO_POLICIES, read_policies
from services.router.scheduling.policies.registry import ComposedPolicies
from services.router.scheduling.prompts import no_preprocess
from services.router.scheduling.selection import Thresholds
from services.router.servers import RouterServer, RunningRouter, further_servers
from services.router.settings import RouterSettings
from services.router.state.reservations.cost import CostModel
from services.router.state.store.base import Store
from services.router.state.store.memory import MemoryStore
from services.router.state.sync.reservation_owners import OWNER_KEEPALIVE_MS
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)


def make_store(settings: RouterSettings) -> Store:
    """Returns the store selected by the settings; raises SluiceError for an invalid Redis URL."""
    url = settings.redis_url.get_secret_value()
    if not url:
        return MemoryStore()
    from services.router.state.store.redis import RedisStore

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
        tokenize=bodies.tokenized if bodies is not None else no_preprocess,
        policies=policies,
    )
    cost = CostModel(prefill_load_scale=settings.prefill_load_scale, temperature=settings.temperature)
    service = RouterService(router, cost, settings.session_pause_s)
    server = GrpcServer(settings, router_pb2.DESCRIPTOR, keepalive_ms=OWNER_KEEPALIVE_MS)
    router_pb2_grpc.add_RouterServicer_to_server(service, server.server)
    running = RunningRouter(settings, router, service, cost, pace, stop.fail)
    servers: list[RouterServer] = [server, *further_servers(running)]
    if bodies is not None:
        await bodies.start()
    for each in servers:
        await each.start()
    router.start()
    if on_listening is not None:
        on_listening.set_result(server.port)
    waits = {asyncio.ensure_future(router.ready.wait()), asyncio.ensure_future(stop.wait())}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if not stop.is_set():
        for each in servers:
            await each.set_serving(True)
        log.info("router is ready", extra={"store": "redis" if settings.redis_url.get_secret_value() else "memory"})
    await stop.wait()
    await asyncio.gather(*(each.set_serving(False) for each in servers))
    service.stop()
    await asyncio.gather(*(each.stop(settings.drain_s) for each in servers))
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
