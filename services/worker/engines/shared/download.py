"""Fetches a model from the hub before an engine starts, and says how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from services.common import models

DOWNLOADING = "downloading the model"
NO_WEIGHTS_TWICE = ("*.bin", "*.gguf", "*.onnx", "original/*")

OnPhase = Callable[[str, float | None], None]


async def download(source: str, on_phase: OnPhase, *, weights: bool = True) -> None:
    """Has the files of a hub id in the local cache; does nothing for a folder.

    Args:
        on_phase: called from the event loop with the share of the bytes known so far.
        weights: False for the tokenizer's files alone.

    Raises:
        SluiceError: NOT_FOUND when the hub does not have it or cannot be reached.
    """
    if not models.is_hub_id(source):
        return
    loop = asyncio.get_running_loop()
    on_phase(DOWNLOADING, None)

    def tell(share: float) -> None:
        loop.call_soon_threadsafe(on_phase, DOWNLOADING, share)

    what = {"ignore_patterns": NO_WEIGHTS_TWICE} if weights else {"allow_patterns": models.TOKENIZER_FILES}
    await asyncio.to_thread(models.download, source, tqdm_class=_teller(tell), **what)


def _teller(tell: Callable[[float], None]) -> type[Any]:
    """A progress bar that shows nothing and tells its share, once a percent."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Nowhere:
        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            pass

    class EventEncoder(tqdm):  # type: ignore[misc]  # has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            self._told = -1
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": Nowhere(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            done: bool | None = super().update(n)
            percent = int(100 * self.n / self.total) if self._counts_bytes and self.total else -1
            if percent > self._told:
                self._told = percent
                tell(min(percent / 100, 1.0))
            return done

    return EventEncoder
