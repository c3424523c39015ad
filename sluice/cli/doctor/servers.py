"""Checks every gRPC server: address, health, version, clock and certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from sluice import __version__
from sluice.cli.doctor import certificates as certificate_checks
from sluice.cli.doctor.finding import CLOCK_WARN_S, Finding, FindingState, clock, fail, ok, warn
from sluice.cli.live.client import UNREACHABLE, Running, Seen


class Server(NamedTuple):
    """A gRPC server; `draining` and `set_aside` as reported by the router."""

    name: str
    address: str
    draining: bool = False
    set_aside: str = ""


async def examine(running: Running, servers: Sequence[Server]) -> list[Finding]:
    """Returns a finding per server, then a summary of clocks and certificates, or each one with a problem."""
    statuses = await asyncio.gather(*(running.status_of(server.address) for server in servers))
    found = [_server_finding(server, status) for server, status in zip(servers, statuses, strict=True)]
    found += _clocks(servers, statuses)
    return [*found, *await _certificates(running, servers)] if running.endpoint.trust.encrypted else found


def version(check: str, reported: str) -> Finding:
    """Compares the version of a service with this command's."""
    if reported == __version__:
        return ok(check, reported)
    return warn(check, f"{reported}, while this command is {__version__}", "Bring all parts to the same version.")


def _server_finding(server: Server, status: Seen) -> Finding:
    check = f"{server.name} {server.address}"
    if status.health == UNREACHABLE:
        advice = "The gateway can reach it, this machine cannot: check network policies, names and TLS (--tls)."
        return warn(check, f"cannot be reached from this machine: {status.reason}", advice)
    if server.set_aside:
        advice = "State its model in the list of engines or with --model; another tokenizer needs another model name."
        return fail(check, f"receives no requests: {server.set_aside}", advice)
    if server.draining:
        return warn(check, "is draining", "No action is needed if it was stopped.")
    if status.health != "SERVING":
        return fail(check, f"health is {status.health}", "Check its log; it may still be loading, or draining.")
    if status.version != __version__:
        return version(check, f"serves, version {status.version or 'unknown'}")
    return ok(check, f"serves, version {__version__}")


def _clocks(servers: Sequence[Server], statuses: Sequence[Seen]) -> list[Finding]:
    reported = [
        (server, status.ahead_s) for server, status in zip(servers, statuses, strict=True) if status.ahead_s is not None
    ]
    findings = [clock(f"clock of {server.name} {server.address}", ahead_s) for server, ahead_s in reported]
    problems = [finding for finding in findings if finding.advice]
    if problems or not reported:
        return problems
    return [ok("clocks", f"{len(reported)} services within {CLOCK_WARN_S:g} s of this machine's")]


async def _certificates(running: Running, servers: Sequence[Server]) -> list[Finding]:
    def check_certificate(server: Server) -> Finding:
        host, _, port = server.address.rpartition(":")
        check = f"certificate of {server.name} {server.address}"
        return certificate_checks.presented(check, host.strip("[]"), int(port), running.endpoint, grpc=True)

    found = await asyncio.gather(*(asyncio.to_thread(check_certificate, server) for server in servers))
    problems = [finding for finding in found if finding.state in (FindingState.WARN, FindingState.FAIL)]
    valid = sum(finding.state is FindingState.OK for finding in found)
    return problems or (
        [ok("certificates of services", f"{valid} checked, all valid for two weeks or more")] if valid else []
    )
