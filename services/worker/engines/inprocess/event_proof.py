"""Proves that the KV events of a running engine describe its prompts as Sluice hashes them."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.hashing import block_hashes
from services.worker.kv_events.source import EngineCacheSource

PROBE_S = 120.0
PROOF_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
PROOF_BLOCKS = 2
CHECK_INTERVAL_S = 0.02


class EventProof:
    """Lets one rank compute a prompt of random tokens, whose blocks the events that follow must contain.

    This proves the endpoint, the block size, and that the tokens in the events are those of the prompt. The engine's
    own hashes are not compared, so its hash algorithm and seed do not matter.

    Args:
        source: Receives the events of the rank.
        endpoint: Where the events come from, for messages.
        block_size: Tokens per Sluice block.
        vocab_size: Tokens of the prompt are below it.
    """

    def __init__(self, source: EngineCacheSource, endpoint: str, block_size: int, vocab_size: int) -> None:
        self._source = source
        self._endpoint = endpoint
        self._block_size = block_size
        self._vocab_size = vocab_size

    async def run(
        self, probe: Callable[[array[int]], Awaitable[None]], failure: Callable[[], BaseException | None]
    ) -> str:
        """Returns why the events cannot be used, as a sentence; empty: they are proven.

        Tries again, because the connection may still be opening.

        Args:
            probe: Computes a prompt on the rank.
            failure: Returns the error with which the subscription failed, which is raised; None if it did not.

        Raises:
            SluiceError: ENGINE_SHUTDOWN when the engine ends.
        """
        for wait_s in PROOF_WAITS_S:
            size = PROOF_BLOCKS * self._block_size + 1
            prompt = array("I", random.choices(range(self._vocab_size), k=size))
            try:
                async with asyncio.timeout(PROBE_S):
                    await probe(prompt)
            except TimeoutError:
                return f"The engine did not compute a prompt within {PROBE_S:g} s, so its KV events cannot be proven."
            except SluiceError as error:
                if error.kind is ErrorKind.ENGINE_SHUTDOWN:
                    raise
                return f"The engine did not compute a prompt, so its KV events cannot be proven: {error.message}"
            if await self._arrived(block_hashes(prompt, self._block_size), wait_s, failure):
                return ""
        if self._source.sequencer.expected:
            return (
                f"The KV events from {self._endpoint} do not contain the tokens of a prompt that the engine "
                "computed; check that they are this engine's."
            )
        return (
            f"No KV events arrived from {self._endpoint} after a prompt; check the endpoint, and that the engine "
            "caches prefixes."
        )

    async def _arrived(self, hashes: Sequence[int], wait_s: float, failure: Callable[[], BaseException | None]) -> bool:
        deadline = time.monotonic() + wait_s
        while not self._source.translator.holds(hashes):
            if (error := failure()) is not None:
                raise error
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(CHECK_INTERVAL_S)
        return True
