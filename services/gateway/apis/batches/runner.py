"""Claims batches, several at a time and the tenants in turn, and works on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter

from services.common.base.errors import SluiceError
from services.common.base.tasks import end_all
from services.gateway.apis.batches.store import BatchClaim
from services.gateway.apis.batches.work import ClaimedBatch, ClaimLost, Work

log = logging.getLogger(__name__)

POLL_S = 1.0
MAX_OPEN = 32
"""Batches that a gateway works on at the same time; further ones wait."""
MAX_OPEN_PER_TENANT = 2
"""Batches of one tenant that a gateway works on at the same time; further ones wait."""


class BatchRunner:
    """Works on the batches of the store."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._open: dict[asyncio.Task[None], str] = {}

    async def run(self) -> None:
        """Claims and runs batches until cancelled."""
        try:
            while True:
                claim = await self._claim() if len(self._open) < MAX_OPEN else None
                if claim is not None:
                    task = asyncio.create_task(self._work_on(claim), name="batch")
                    self._open[task] = claim.owner
                    task.add_done_callback(self._open.pop)
                elif self._open:
                    await asyncio.wait(self._open, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(POLL_S)
        finally:
            await end_all(list(self._open))

    async def _claim(self) -> BatchClaim | None:
        busy = [owner for owner, number in Counter(self._open.values()).items() if number >= MAX_OPEN_PER_TENANT]
        try:
            return await self._work.store.claim(self._work.lease_s, busy)
        except SluiceError:
            return None

    async def _work_on(self, claim: BatchClaim) -> None:
        """Works on a batch; what it raises ends the work on this batch only."""
        lapses = False
        try:
            stored = await self._work.store.batch(claim.owner, claim.batch_id)
            if stored is not None:
                await ClaimedBatch(self._work, claim, stored.record).run()
        except ClaimLost:
            log.info("batch is left to another gateway or deleted", extra={"batch": claim.batch_id})
        except SluiceError as error:
            log.warning("batch interrupted: %s", error.message, extra={"batch": claim.batch_id})
        except Exception:
            log.exception("batch interrupted", extra={"batch": claim.batch_id})
            lapses = True  # the claim counts as lost
        finally:
            if not lapses:
                with contextlib.suppress(SluiceError):
                    await self._work.store.renew(claim, 0)
