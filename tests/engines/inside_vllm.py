"""Runs the vllm engine in this process through a sequence of requests and reports what its cache did: JSON in and out.

In: {"argv": flags of the worker, "requests": [[prompt, max_tokens], ...]}. Out, of each request: tokens, cached tokens,
and the cache's changes in order, as [1, hash] for stored and [-1, hash] for removed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, KvEvent
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import GenerateRequest, SamplingParams, StopParams
from services.worker.engines.vllm import VllmEngine
from services.worker.settings import WorkerSettings

QUIET_S = 0.4


class Changes:
    """Of the cache, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int]] = []

    def hear(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored | BlocksRemoved):
                sign = 1 if isinstance(event, BlocksStored) else -1
                self.log += [(sign, block_hash) for block_hash in event.hashes]

    async def take(self) -> list[tuple[int, int]]:
        """What happened, once nothing more does."""
        seen = -1
        while seen != len(self.log):
            seen = len(self.log)
            await asyncio.sleep(QUIET_S)
        taken, self.log = self.log, []
        return taken


async def run(question: dict[str, Any]) -> list[dict[str, Any]]:
    """One request after the other."""
    engine = VllmEngine.from_args(WorkerSettings.load(question["argv"]))
    try:
        config = await engine.start("inside")
        changes = Changes()
        engine.kv_event_sources()[0].subscribe(changes.hear)
        answers = []
        for number, (prompt, max_tokens) in enumerate(question["requests"]):
            request = GenerateRequest(
                f"r{number}",
                config.model,
                array("I", prompt),
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
            )
            tokens: list[int] = []
            cached = 0
            async for delta in engine.generate(request, GenerateContext(request.request_id)):
                tokens += delta.token_ids
                cached = delta.cached_tokens if delta.cached_tokens is not None else cached
            answers.append({"tokens": tokens, "cached": cached, "changes": await changes.take()})
        return answers
    finally:
        await engine.cleanup()


def main() -> None:
    """Reads the question from standard input."""
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
