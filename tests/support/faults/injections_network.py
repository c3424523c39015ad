"""Faults of the network between a process and all others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.support.faults.fault import Scene
from tests.support.faults.network import Network

PARTITION_S = 20.0
"""Longer than it takes until everyone has noticed."""
WEAK_S = 10.0
DELAY_S = 0.2
LOSS = "0.05"
LOSES = ("--match", "statistic", "--mode", "random", "--probability", LOSS)


def _network(scene: Scene) -> Network:
    assert scene.place.network is not None
    return scene.place.network


async def reset(scene: Scene) -> None:
    """Resets every connection of a process."""
    await asyncio.to_thread(_network(scene).inside, scene.victim, "ss", "--kill", "--tcp")
    await scene.place.whole()


async def partitioned(scene: Scene) -> None:
    """Nothing reaches a process, and nothing leaves it."""
    network = _network(scene)
    await asyncio.to_thread(network.unplug, scene.victim)
    try:
        await asyncio.sleep(PARTITION_S)
    finally:
        await asyncio.to_thread(network.plug, scene.victim)
    await scene.place.whole()


async def half_partitioned(scene: Scene) -> None:
    """Nothing reaches a process; what it sends arrives."""
    await _filtered(scene, PARTITION_S, ["INPUT"], ())


async def lossy(scene: Scene) -> None:
    """One packet of twenty is lost in each direction."""
    await _filtered(scene, WEAK_S, ["INPUT", "OUTPUT"], LOSES)


async def _filtered(scene: Scene, seconds: float, chains: Sequence[str], matches: Sequence[str]) -> None:
    """Drops packets of a process's network for a time."""
    network = _network(scene)
    for chain in chains:
        side = ("--in-interface", "inner") if chain == "INPUT" else ("--out-interface", "inner")
        await asyncio.to_thread(
            network.inside, scene.victim, "iptables", "--append", chain, *side, *matches, "--jump", "DROP"
        )
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(network.inside, scene.victim, "iptables", "--flush")
    await scene.place.whole()


async def delayed(scene: Scene) -> None:
    """What a process sends arrives 200 ms later."""
    network = _network(scene)
    await asyncio.to_thread(network.slow_down, scene.victim, DELAY_S)
    try:
        await asyncio.sleep(WEAK_S)
    finally:
        await asyncio.to_thread(network.speed_up, scene.victim)
    await scene.place.whole()
