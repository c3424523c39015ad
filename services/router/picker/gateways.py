"""Gateways that picked requests go to, where workers have no HTTP server of their own."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from services.common.net.addresses import host_port, join

log = logging.getLogger(__name__)

RESOLVE_EVERY_S = 5.0
RESOLVE_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class GatewayEndpoint:
    """A gateway and the requests of this picker that run there."""

    endpoint: str
    requests: int = 0


class Gateways:
    """The addresses of gateways, from names that resolve to all of them; run `resolve_forever` as a task."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets
        self._gateways: dict[str, GatewayEndpoint] = {}

    def choose(self, allows: Callable[[str], bool], fallbacks: int) -> tuple[GatewayEndpoint | None, tuple[str, ...]]:
        """Returns the gateway with the fewest requests, and the endpoints of the next ones.

        Args:
            allows: whether an endpoint may be chosen.
        """
        allowed = [each for each in self._gateways.values() if allows(each.endpoint)]
        if not allowed:
            return None, ()
        first, *others = sorted(allowed, key=lambda each: each.requests)
        self._gateways.pop(first.endpoint)  # of equal ones, in turn
        self._gateways[first.endpoint] = first
        return first, tuple(each.endpoint for each in others[:fallbacks])

    async def resolve_forever(self) -> None:
        """Follows the addresses behind the names until cancelled."""
        while True:
            await self.resolve()
            await asyncio.sleep(RESOLVE_EVERY_S)

    async def resolve(self) -> None:
        """Resolves all names once; one that cannot be resolved keeps its addresses."""
        found: dict[str, GatewayEndpoint] = {}
        for target in self._targets:
            try:
                host, port = cast("tuple[str, int]", host_port(target))  # checked with the settings
                async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, TimeoutError) as error:
                log.warning("cannot resolve a gateway", extra={"target": target, "error": str(error)})
                found |= self._gateways
                continue
            endpoints = sorted({join(str(answer[4][0]), port) for answer in answers})
            found |= {each: self._gateways.get(each) or GatewayEndpoint(each) for each in endpoints}
        self._gateways = found
