"""Suites that are deliberately wrong: a matrix that stays green with one of them proves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_RUN = "sys.argv.pop(0); runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


@dataclass(frozen=True, slots=True)
class Break:
    """What is wrong.

    Attributes:
        reds: parts whose cells it turns red, with the fault.
        gateway_flags, router_flags, worker_flags: of every gateway, router or worker.
        code_of: code that single processes run instead, by name, as LooseSuite has it.
    """

    name: str
    about: str
    reds: tuple[tuple[str, str], ...] = ()
    gateway_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    worker_flags: tuple[str, ...] = ()
    code_of: Mapping[str, str] = field(default_factory=dict)


NOTHING = Break("", "as it is")

BREAKS: Mapping[str, Break] = {
    found.name: found
    for found in (
        Break(
            "migration-off",
            "gateways do not move generations to another worker",
            reds=(("worker", "sigkill"),),
            gateway_flags=("--no-migration",),
        ),
        Break(
            "leases-off",
            "routers keep the reservations of owners that are gone for an hour",
            reds=(("gateway", "sigkill"),),
            router_flags=("--owner-lease-ms", "3600000"),
        ),
    )
}
