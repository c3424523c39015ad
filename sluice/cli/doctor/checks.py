"""Runs all checks, in the order in which a request passes the services."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from services.common.base.packing import pack_u32
from services.gateway.backends.workers.overview import WorkerState
from sluice.cli.doctor import certificates
from sluice.cli.doctor import redis as redis_checks
from sluice.cli.doctor import servers as server_checks
from sluice.cli.doctor.finding import Finding, FindingState, clock, fail, ok, skipped, warn
from sluice.cli.doctor.servers import Server, version
from sluice.cli.extensions import all_rows
from sluice.cli.live.client import NotReached, Running
from sluice.v1 import router_pb2

__all__ = ["Finding", "FindingState", "examine", "extensions"]

START = "Start it, and check the address configured at the gateway."


async def examine(running: Running, redis_url: str) -> Sequence[Finding]:
    """Returns all findings; an empty `redis_url` skips Redis."""
    findings = await _gateway(running)
    state: dict[str, Any] | None = None
    if findings[0].state is not FindingState.FAIL:
        try:
            state = await running.state()
        except NotReached as error:
            advice = "Start the gateway with --ui, and pass an --api-key with the scope operate if it requires one."
            findings.append(warn("live view", str(error), advice))
    servers: list[Server] = []
    if state is not None:
        found, servers = _services(state)
        findings += found
    found, workers = await _workers(running)
    findings += found
    servers += [Server(worker.id, worker.address, worker.draining, worker.set_aside) for worker in workers]
    findings += await server_checks.examine(running, servers)
    findings += await _routing(running, workers)
    if findings[0].state is not FindingState.FAIL:
        findings += await _parity(running)
    findings += await redis_checks.examine(redis_url)
    findings += await asyncio.to_thread(certificates.examine, running.endpoint)
    findings += await asyncio.to_thread(extensions)
    return findings


async def _gateway(running: Running) -> list[Finding]:
    url = running.endpoint.gateway
    try:
        await running.get("/health")
        ready = await running.get("/ready?workers=0", "ready", "workers")
    except NotReached as error:
        return [fail("gateway", str(error), "Start the suite with `sluice up`, or pass its URL with --gateway.")]
    found = [ok("gateway", f"responds at {url}")]
    missing = [name for name, count in ready.get("services", {}).items() if not count]
    if missing:
        found.append(fail("gateway ready", f"no replica of {', '.join(missing)} serves", START))
    elif not ready["ready"]:
        found.append(fail("gateway ready", "it has not discovered the workers yet", "Wait, or check the router's log."))
    elif "models" not in ready:  # API keys are required, and this one is missing or wrong
        found.append(warn("gateway ready", f"{ready['workers']} workers connected", "Pass --api-key for the rest."))
    else:
        found.append(ok("gateway ready", f"{ready['workers']} workers connected, models {', '.join(ready['models'])}"))
    advice = "The gateway serves without it; its log has the reason, `sluice extensions` on its machine too."
    found += [warn(f"gateway extension {name}", "is missing", advice) for name in ready.get("missing_extensions", ())]
    return found


def _services(state: dict[str, Any]) -> tuple[list[Finding], list[Server]]:
    """Checks the services as the gateway reports them; returns the findings and their servers."""
    found = [
        version("gateway version", state["version"]),
        clock("gateway clock", (state["unix_ms"] - state["answered_unix_ms"]) / 1000),
    ]
    servers = []
    for name, node in state["nodes"].items():
        if not node["serving"]:
            found.append(fail(name, "no replica serves", START))
        found += [
            warn(f"{name} {address}", "is configured at the gateway, but does not serve", START)
            for address in node["away"]
        ]
        servers += [Server(name, address) for address in node["serving"]]
    for reason, times in state["degraded"].items():
        found.append(warn("degraded", f"{reason}, {times} times in the last minute", "See docs/resilience.md."))
    return found, servers


async def _workers(running: Running) -> tuple[list[Finding], Sequence[WorkerState]]:
    try:
        workers = await running.workers()
    except NotReached as error:
        return [fail("router", str(error), "Start a router, or pass its address with --router.")], ()
    if not workers:
        return [fail("workers", "none has registered", "Start one with `sluice worker --routers HOST:PORT`.")], ()
    findings = []
    engines: dict[tuple[str, str], set[str]] = defaultdict(set)
    for worker in workers:
        engines[worker.model, worker.engine].add(worker.version)
    for (model, engine), versions in engines.items():
        if len(versions) > 1:
            found = f"{engine} in versions {', '.join(sorted(versions))} for {model}"
            findings.append(warn("engines", found, "Equal prompts may get different output; use one version."))
    return findings, workers


async def _routing(running: Running, workers: Sequence[WorkerState]) -> list[Finding]:
    """Requests one decision for each model, without a reservation."""
    found = []
    for model in sorted({worker.model for worker in workers}):
        check = f"routing {model}"
        try:
            decision = await running.route(model, router_pb2.PromptRef(token_ids=pack_u32([1, 2, 3])))
        except NotReached as error:
            found.append(fail(check, str(error), "Check the router's log."))
            continue
        if decision.degraded == "store_unavailable":
            advice = "The router cannot reach Redis; check --redis-url, the password and the network."
            found.append(fail(check, f"degraded: {decision.degraded}", advice))
        elif decision.degraded:
            found.append(warn(check, f"degraded: {decision.degraded}", "See docs/router.md."))
        else:
            found.append(ok(check, f"{len(decision.scores)} candidates, index {decision.index_age_ms} ms old"))
    return found


def extensions() -> list[Finding]:
    """Checks the extensions of this machine, imported in other processes.

    Each that is broken is a finding; the others are one together, if there is one.
    """
    rows = all_rows()
    usable = [row.extension.name for row in rows if not row.reason]
    broken = [row for row in rows if row.reason and not row.optional]
    optional = [f"{row.extension.name} ({row.reason})" for row in rows if row.optional]
    found = [f"{state}: {', '.join(names)}" for state, names in (("usable", usable), ("missing", optional)) if names]
    advice = "The services of this machine do without it; `sluice extensions` lists all."
    return [
        *([ok("extensions", "; ".join(found))] if found else []),
        *(warn(f"extension {row.extension.name}", row.reason, advice) for row in broken),
    ]


async def _parity(running: Running) -> list[Finding]:
    """Checks whether preprocess produces the same prompts as the workers' engines."""
    try:
        models = (await running.get("/v1/models", "data"))["data"]
    except NotReached as error:
        return [skipped("parity", str(error))]
    found = [_parity_of(model["id"], model["tokenizer"]["parity"]) for model in models]
    return [
        *found,
        *(_template_of(model["id"], shown) for model in models if (shown := model["tokenizer"].get("template"))),
    ]


def _template_of(model: str, shown: dict[str, Any]) -> Finding:
    """Returns what the chat template of a model shows; conversations are fitted to it."""
    words = (name if value is True else f"{name} {value}" for name, value in shown.items() if value and value != [])
    return ok(f"template {model}", ", ".join(words))


def _parity_of(model: str, parity: str) -> Finding:
    check = f"parity {model}"
    if parity == "differs":
        advice = (
            "Use the same model files for preprocess and the workers; `sluice diff-tokenizers` shows the differences."
        )
        return fail(check, "preprocess produces different prompts than the workers' engine", advice)
    if parity == "unknown":
        return warn(
            check, "not reported", "Preprocess may still be loading the model, or the engine does not report it."
        )
    return ok(check, parity.replace("_", " "))
