"""Faults of what authenticates processes: a certificate expires while it is in use, tokens are rotated."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from services.common.security.file_watcher import CHECK_EVERY_S
from services.common.security.identity import OPERATOR
from tests.support.faults.credentials import Credentials
from tests.support.faults.fault import Scene

LASTS_S = 5.0
"""Longer than it takes until the certificate is in use, on new connections to others."""
UNNOTICED_S, UNREACHABLE_S = 5.0, 10.0
"""For which a certificate has expired, before and after its connections are reset."""
LATE_S = 2.0
"""For which some processes have files of tokens that others do not have yet."""
READ_S = 2 * CHECK_EVERY_S
ROTATION = ("prepare", "switch", "finish")


def _credentials(scene: Scene) -> Credentials:
    assert scene.place.credentials is not None
    return scene.place.credentials


async def certificate_expired(scene: Scene) -> None:
    """Lets the certificate of a process expire: connections go on, and none is accepted once they are reset."""
    credentials, network = _credentials(scene), scene.place.network
    assert network is not None
    try:
        await asyncio.to_thread(credentials.issue, scene.victim, timedelta(seconds=LASTS_S))
        await asyncio.sleep(LASTS_S + UNNOTICED_S)
        await asyncio.to_thread(network.inside, scene.victim, "ss", "--kill", "--tcp")
        await asyncio.sleep(UNREACHABLE_S)
    finally:
        await asyncio.to_thread(credentials.issue, scene.victim)
    await asyncio.sleep(READ_S)
    await scene.place.whole()


async def tokens_rotated(scene: Scene) -> None:
    """Takes the documented steps; those of the victim's part get their files after all others, in each of them."""
    credentials = _credentials(scene)
    names = scene.place.suite.names
    own = [name for name in names if name.startswith(scene.part.tier)]
    others = [OPERATOR, *(name for name in names if name not in own)]
    for step in ROTATION:
        await asyncio.to_thread(credentials.rotate, step)
        for some in (others, own):
            await asyncio.to_thread(credentials.give, some)
            await asyncio.sleep(LATE_S)
        await asyncio.sleep(READ_S)
    await scene.place.whole()
