"""The parts of a suite: where each is run, which process is disturbed, and what cannot be perfect by nature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ROUTER_SERVERS = ("routers", "pickers")
ASKS_AGAIN = ("unavailable",)
POOL, PAIRS = "pool", "pairs"
SENTINEL, CLUSTER, NAMES, SECURED = "sentinel", "cluster", "names", "secured"


@dataclass(frozen=True, slots=True)
class Topology:
    """A suite: two of every tier, with routers and gateways on one Redis.

    Attributes:
        workers: that answer; with some that prefill, these only decode.
        redis: single, sentinel or cluster.
        names: processes know each other by names, which a server of names resolves.
        secured: certificates and tokens between processes, and HTTPS.
        parts_of: another topology whose parts it has, too.
    """

    name: str
    workers: int = 3
    prefill: int = 0
    redis: str = "single"
    names: bool = False
    secured: bool = False
    parts_of: str = ""


TOPOLOGIES: Mapping[str, Topology] = {
    found.name: found
    for found in (
        Topology(POOL),
        Topology(PAIRS, workers=2, prefill=2),
        Topology(SENTINEL, redis="sentinel"),
        Topology(CLUSTER, redis="cluster"),
        Topology(NAMES, names=True),
        Topology(SECURED, secured=True, parts_of=POOL),
    )
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part.

    Attributes:
        victim: name of the process that is disturbed.
        tier: beginning of the names of its replicas.
        retries: servers whose clients go to the next one when theirs is gone: those that the fault ends; `unavailable`:
            clients ask again after a 503.
        needs: of the machine, as in host.NEEDS.
    """

    name: str
    topology: str
    victim: str
    tier: str
    retries: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


PARTS: Mapping[str, Part] = {
    found.name: found
    for found in (
        Part("worker", POOL, "worker-0", "worker"),
        Part("prefill-worker", PAIRS, "prefill-0", "prefill"),
        Part("decode-worker", PAIRS, "worker-0", "worker"),
        Part("preprocess", POOL, "preprocess", "preprocess"),
        Part("router", POOL, "router", "router", retries=ROUTER_SERVERS),
        Part("postprocess", POOL, "postprocess-0", "postprocess"),
        Part("gateway", POOL, "gateway", "gateway", retries=("gateways",)),
        Part("picker", POOL, "router-1", "router", retries=ROUTER_SERVERS),
        Part("redis", POOL, "redis", "redis", retries=ASKS_AGAIN),
        Part("redis-sentinel", SENTINEL, "redis", "redis", retries=ASKS_AGAIN),
        Part("redis-cluster", CLUSTER, "redis", "redis", retries=ASKS_AGAIN),
        Part("dns", NAMES, "dns", "dns", needs=("namespaces", "mount")),
    )
}


def victims(topology: Topology) -> list[str]:
    """Returns the processes of a topology that parts name."""
    names = (topology.name, topology.parts_of)
    return sorted({part.victim for part in PARTS.values() if part.topology in names})


def loads_of(topology: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of several loads that a topology has."""
    return tuple(name for name in names if name != "pairs" or topology == PAIRS)
