"""Compares the tokenizers of preprocess with those of the workers' engines, by fingerprints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from services.common.base.errors import SluiceError
from services.common.discovery.tokenizer_agreement import agreement, same_tokenizer
from services.common.observability.instruments import watch
from services.gateway.backends.rpc.preprocess import TokenizerIdentity
from services.gateway.metrics import PARITY

log = logging.getLogger(__name__)

REFRESH_EVERY_S = 10.0
MIN_REFRESH_S = 1.0
"""Seconds between two refreshes that models with an unknown tokenizer cause."""

PROVEN = "same_prompts"
SAME_FILES = "same_files"
DIFFERS = "differs"
UNKNOWN = "unknown"


class Worker(Protocol):
    """Fingerprints of a worker's tokenizer; implemented by `WorkerEntry`."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def prompt_fingerprint(self) -> str: ...

    @property
    def media_fingerprint(self) -> str: ...


def compare(ours: TokenizerIdentity | None, theirs: Worker) -> str:
    """Compares the tokenizers of preprocess and of a worker.

    Returns:
        "same_prompts" if a fixed set of chats yields the same ids on both sides, "same_files" if that is unknown but
        both have the same files, "differs", or "unknown".
    """
    if ours is None:
        return UNKNOWN
    same = same_tokenizer(ours, theirs)
    if same is None:
        return UNKNOWN
    if not same:
        return DIFFERS
    proven = agreement(ours.prompt_fingerprint, theirs.prompt_fingerprint) is not None
    return PROVEN if proven else SAME_FILES


def compare_media(ours: TokenizerIdentity | None, theirs: Worker) -> str:
    """Returns "same_prompts", "differs" or "unknown": whether both sides make the same tokens of sample images."""
    agree = agreement(ours.media_fingerprint, theirs.media_fingerprint) if ours is not None else None
    return UNKNOWN if agree is None else PROVEN if agree else DIFFERS


class TokenizerParity:
    """Compares the tokenizers of every model; create it after telemetry is configured.

    Args:
        list_tokenizers: returns the tokenizers of preprocess, by model.
        workers: returns the workers of a model.
        models: returns the served models.
        on_media: called with the media fingerprints of preprocess, by model, whenever they were listed.
    """

    def __init__(
        self,
        list_tokenizers: Callable[[], Awaitable[dict[str, TokenizerIdentity]]],
        workers: Callable[[str], Sequence[Worker]],
        models: Callable[[], list[str]],
        on_media: Callable[[Mapping[str, str]], None] = lambda fingerprints: None,
    ) -> None:
        self._list_tokenizers = list_tokenizers
        self._workers = workers
        self._models = models
        self._on_media = on_media
        self._ours: dict[str, TokenizerIdentity] = {}
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._last_states: dict[str, str] = {}
        watch(PARITY, self._observe)

    async def run(self) -> None:
        """Compares periodically until cancelled."""
        while True:
            async with self._refreshing:
                await self._refresh()
            await asyncio.sleep(REFRESH_EVERY_S)

    async def freshen(self) -> None:
        """Refreshes if the tokenizer of a served model is missing, at most once per MIN_REFRESH_S.

        A refresh that is running is waited for: its result may have the tokenizer.
        """
        if not self._lacks_one:
            return
        async with self._refreshing:
            if self._lacks_one and asyncio.get_running_loop().time() - self._refreshed_at > MIN_REFRESH_S:
                await self._refresh()

    @property
    def _lacks_one(self) -> bool:
        return any(model not in self._ours for model in self._models())

    async def _refresh(self) -> None:
        self._refreshed_at = asyncio.get_running_loop().time()
        try:
            self._ours = await self._list_tokenizers()
        except SluiceError as error:
            log.debug("listing the tokenizers of preprocess failed: %s", error.message)
        else:
            self._on_media({model: ours.media_fingerprint for model, ours in self._ours.items()})
        for model in self._models():
            state = self.state(model)
            if state == DIFFERS and self._last_states.get(model) != DIFFERS:
                log.warning("tokenizers of preprocess and a worker differ", extra={"model": model})
            self._last_states[model] = state

    def state(self, model: str) -> str:
        """Returns the worst state among the model's workers."""
        return self._worst(model, compare)

    def media(self, model: str) -> frozenset[str] | None:
        """Returns the kinds of media items that preprocess takes for a model; None if that is unknown."""
        ours = self._ours.get(model)
        if ours is None or (ours.media_fingerprint and not ours.media):  # a replica of an older version
            return None
        return ours.media

    def _worst(self, model: str, compare: Callable[[TokenizerIdentity | None, Worker], str]) -> str:
        states = {compare(self._ours.get(model), worker) for worker in self._workers(model)}
        return next((state for state in (DIFFERS, UNKNOWN, SAME_FILES, PROVEN) if state in states), UNKNOWN)

    def of_model(self, model: str) -> dict[str, Any]:
        """Returns parity and fingerprints for the model's entry in /v1/models."""
        ours = self._ours.get(model)
        workers = self._workers(model)
        return {
            "parity": self.state(model),
            "media_parity": self._worst(model, compare_media),
            "processor": ours.processor if ours is not None else None,
            "fingerprint": ours.fingerprint if ours is not None else None,
            "prompt_fingerprint": ours.prompt_fingerprint if ours is not None else None,
            "template": ours.template if ours is not None else None,
            "worker_fingerprints": sorted({worker.fingerprint for worker in workers if worker.fingerprint}),
            "worker_prompt_fingerprints": sorted(
                {worker.prompt_fingerprint for worker in workers if worker.prompt_fingerprint}
            ),
        }

    def _observe(self) -> Iterator[tuple[float, dict[str, str]]]:
        for model in self._models():
            yield 1, {"model": model, "state": self.state(model)}
