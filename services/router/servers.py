"""Further servers of a router process, beside that of its RPCs; each is an extension, which its package registers.

An entry point of the group `sluice.router_servers` names a class that is made with a RunningRouter. The one called NAME
is used if the setting `NAME_listen` is set, or if the router has no such setting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.common.net.intake.pace import BodyPace
from services.common.packages.extensions import ROUTER_SERVERS, UnusableExtension, installed_names, load_extension
from services.router.router import Router
from services.router.rpc.service import RouterService
from services.router.settings import RouterSettings
from services.router.state.reservations.cost import CostModel

log = logging.getLogger(__name__)

OWN = frozenset({"http", "picker"})
"""Servers that the suite's own distribution registers."""


class RouterServer(Protocol):
    """A server of a router process, as GrpcServer is."""

    async def start(self) -> None:
        """Starts listening, before the router is ready; raises SluiceError if it cannot."""

    async def set_serving(self, serving: bool) -> None:
        """Reports that the router is ready, or that it stops; returns when callers must have noticed."""

    async def stop(self, grace_s: float) -> None:
        """Lets requests finish for `grace_s` seconds, and ends."""


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """What a server may use of the router in its process.

    Attributes:
        service: the RPCs, which can be called without gRPC.
        cost: defaults of queries.
        pace: turns of large bodies, for all entrances of the process.
        on_death: called if a task fails that must not.
    """

    settings: RouterSettings
    router: Router
    service: RouterService
    cost: CostModel
    pace: BodyPace
    on_death: Callable[[str, BaseException], None]


def further_servers(running: RunningRouter) -> list[RouterServer]:
    """Returns the servers that the settings ask for; logs why one that cannot be used is left out.

    Raises:
        SluiceError: a server cannot be made with these settings.
    """
    servers: list[RouterServer] = []
    for name in sorted(OWN | installed_names(ROUTER_SERVERS)):
        if not getattr(running.settings, f"{name}_listen", True):
            continue
        try:
            missing = f"--{name}-listen is set, but no installed package has this server; run: pip install sluice-llm."
            servers.append(load_extension(ROUTER_SERVERS, name, missing)(running))
        except UnusableExtension as error:
            log.error("the router runs without one of its servers: %s", error)
    return servers
