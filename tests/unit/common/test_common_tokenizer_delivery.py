from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from services.common.tokenizer_delivery import Learned, TokenizerDelivery
from services.common.worker_watch import Served, WorkerWatch

OLD, NEW = "0" * 64, "1" * 64


class Kept:
    """A store that has every tokenizer, and knows which are held."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()

    def hold(self, wanted: str) -> bool:
        self.held[wanted] += 1
        return True

    def release(self, wanted: str, remove: bool = False) -> None:
        self.held[wanted] -= 1
        assert self.held[wanted] >= 0

    def find(self, wanted: str) -> Path:
        return Path("/kept") / wanted


def served(fingerprint: str) -> Served:
    return Served("127.0.0.1:1", "m", "hf", fingerprint, "mock")


async def test_a_worker_that_changes_its_tokenizer_while_it_is_learned_is_learned_anew() -> None:
    learning, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    taken: list[str] = []

    async def take(model: Learned) -> None:
        learning.set()
        await go.wait()
        taken.append(model.fingerprint)
        if len(taken) == 2:
            done.set()

    watch, store = WorkerWatch(None), Kept()
    bare: Any = store
    delivery = TokenizerDelivery("test", watch, bare, (), take)
    async with asyncio.timeout(20):
        watch._served["w"] = served(OLD)
        watch.on_change()
        await learning.wait()
        watch._served["w"] = served(NEW)
        watch.on_change()  # the last that is heard of this worker
        go.set()
        await done.wait()
    assert taken == [OLD, NEW]
    await asyncio.sleep(0)
    await delivery._tasks.close()
    assert taken == [OLD, NEW]
    assert store.held == {OLD: 0, NEW: 1}
