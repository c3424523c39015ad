"""What the doctor looks at in every gRPC server that it knows: address, health, version, clock and certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from sluice import __version__
from sluice.cli.doctor import certificates as examining_certificates
from sluice.cli.doctor.finding import CLOCK_WARN_S, Finding, State, clock, fail, ok, warn
from sluice.cli.live.client import Running, Seen


class Server(NamedTuple):
    """One of them; `draining` as the router knows it."""

    name: str
    address: str
    draining: bool = False


async def examine(running: Running, servers: Sequence[Server]) -> list[Finding]:
    """A finding for each, then what their clocks and certificates have in common, and each that is not like that."""
    seen = await asyncio.gather(*(running.look(server.address) for server in servers))
    found = [_judged(server, one) for server, one in zip(servers, seen, strict=True)]
    found += _clocks(servers, seen)
    return [*found, *await _certificates(running, servers)] if running.place.trust.encrypted else found


def version(check: str, said: str) -> Finding:
    """Of a part of the suite, compared with this command's."""
    if said == __version__:
        return ok(check, said)
    return warn(check, f"{said}, while this command is {__version__}", "Bring all parts to the same version.")


def _judged(server: Server, seen: Seen) -> Finding:
    check = f"{server.name} {server.address}"
    if seen.health == "UNREACHABLE":
        advice = "The gateway reaches it, this machine does not: a network policy, another name or TLS (--tls)."
        return warn(check, "cannot be reached from here", advice)
    if server.draining:
        return warn(check, "drains", "Nothing, if it was stopped.")
    if seen.health != "SERVING":
        return fail(check, f"health says {seen.health}", "Look at its log; it may still be loading, or drain.")
    if seen.version != __version__:
        return version(check, f"serves, version {seen.version or 'unknown'}")
    return ok(check, f"serves, version {__version__}")


def _clocks(servers: Sequence[Server], seen: Sequence[Seen]) -> list[Finding]:
    known = [(server, one.ahead_s) for server, one in zip(servers, seen, strict=True) if one.ahead_s is not None]
    apart = [clock(f"clock of {server.name} {server.address}", ahead_s) for server, ahead_s in known]
    wrong = [finding for finding in apart if finding.advice]
    if wrong or not known:
        return wrong
    return [ok("clocks", f"{len(known)} services within {CLOCK_WARN_S:g} s of this machine's")]


async def _certificates(running: Running, servers: Sequence[Server]) -> list[Finding]:
    def look(server: Server) -> Finding:
        host, _, port = server.address.rpartition(":")
        check = f"certificate of {server.name} {server.address}"
        return examining_certificates.shown(check, host.strip("[]"), int(port), running.place, grpc=True)

    found = await asyncio.gather(*(asyncio.to_thread(look, server) for server in servers))
    wrong = [finding for finding in found if finding.state in (State.WARN, State.FAIL)]
    sound = sum(finding.state is State.OK for finding in found)
    return wrong or (
        [ok("certificates of services", f"{sound} seen, all valid for two weeks or more")] if sound else []
    )
