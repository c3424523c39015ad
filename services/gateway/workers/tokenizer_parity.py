"""Whether preprocess makes the prompts that the workers' engines would make: compared as soon as both are known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from services.common.errors import SluiceError
from services.common.observability.instruments import watch
from services.gateway.clients.preprocess import TokenizerIdentity
from services.gateway.metrics import PARITY

log = logging.getLogger(__name__)

ASK_EVERY_S = 10.0
ASK_AGAIN_S = 1.0

PROVEN = "same_prompts"
SAME_FILES = "same_files"
DIFFERS = "differs"
UNKNOWN = "unknown"


class Worker(Protocol):
    """What a worker's card says of its tokenizer."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def prompt_fingerprint(self) -> str: ...


def compare(ours: TokenizerIdentity | None, theirs: Worker) -> str:
    """How a worker's prompts relate to ours.

    Returns:
        "same_prompts" when the fixed set of chats gives the same ids on both sides, "same_files" when the worker does
        not say but has the same files, "differs", or "unknown".
    """
    if ours is None:
        return UNKNOWN
    if ours.prompt_fingerprint and theirs.prompt_fingerprint:
        pairs = list(zip(ours.prompt_fingerprint.split(","), theirs.prompt_fingerprint.split(","), strict=False))
        answered = [(one, other) for one, other in pairs if "-" not in (one, other)]
        if answered:
            return PROVEN if all(one == other for one, other in answered) else DIFFERS
    if not ours.fingerprint or not theirs.fingerprint:
        return UNKNOWN
    return SAME_FILES if ours.fingerprint == theirs.fingerprint else DIFFERS


class TokenizerParity:
    """Compares for every model; make it after telemetry is configured.

    Args:
        ask: what preprocess says now, by model.
        workers: the workers of a model.
        models: the models that are served.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[dict[str, TokenizerIdentity]]],
        workers: Callable[[str], Sequence[Worker]],
        models: Callable[[], list[str]],
    ) -> None:
        self._ask = ask
        self._workers = workers
        self._models = models
        self._ours: dict[str, TokenizerIdentity] = {}
        self._asked_at = float("-inf")
        self._said: dict[str, str] = {}
        watch(PARITY, self._observe)

    async def run(self) -> None:
        """Keeps comparing until cancelled."""
        while True:
            await self._refresh()
            await asyncio.sleep(ASK_EVERY_S)

    async def freshen(self) -> None:
        """Asks again if something is not known yet, but not more than once a second."""
        unknown = any(model not in self._ours for model in self._models())
        if unknown and asyncio.get_running_loop().time() - self._asked_at > ASK_AGAIN_S:
            await self._refresh()

    async def _refresh(self) -> None:
        self._asked_at = asyncio.get_running_loop().time()
        try:
            self._ours = await self._ask()
        except SluiceError as error:
            log.debug("preprocess does not say what tokenizers it has: %s", error.message)
        for model in self._models():
            state = self.state(model)
            if state == DIFFERS and self._said.get(model) != DIFFERS:
                log.warning("preprocess and a worker have different tokenizers", extra={"model": model})
            self._said[model] = state

    def state(self, model: str) -> str:
        """Of all the model's workers, the worst."""
        states = {compare(self._ours.get(model), worker) for worker in self._workers(model)}
        return next((state for state in (DIFFERS, UNKNOWN, SAME_FILES, PROVEN) if state in states), UNKNOWN)

    def of_model(self, model: str) -> dict[str, Any]:
        """For the model's entry in /v1/models: parity, and the fingerprints of both sides."""
        ours = self._ours.get(model)
        workers = self._workers(model)
        return {
            "parity": self.state(model),
            "processor": ours.processor if ours is not None else None,
            "fingerprint": ours.fingerprint if ours is not None else None,
            "prompt_fingerprint": ours.prompt_fingerprint if ours is not None else None,
            "worker_fingerprints": sorted({worker.fingerprint for worker in workers if worker.fingerprint}),
            "worker_prompt_fingerprints": sorted(
                {worker.prompt_fingerprint for worker in workers if worker.prompt_fingerprint}
            ),
        }

    def _observe(self) -> Iterator[tuple[float, dict[str, str]]]:
        for model in self._models():
            yield 1, {"model": model, "state": self.state(model)}
