"""Downloads a model from the hub before an engine starts, and reports the progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from services.common.packages import model_files as models

DOWNLOADING = "downloading the model"
DUPLICATE_WEIGHTS = ("*.bin", "*.gguf", "*.onnx", "original/*")

OnPhase = Callable[[str, float | None], None]


async def download(source: str, on_phase: OnPhase, *, weights: bool = True) -> None:
    """Downloads the files of a hub id into the local cache; does nothing for a folder.

    Args:
        on_phase: called on the event loop with the downloaded fraction of the bytes known so far.
        weights: False to download the tokenizer files only.

    Raises:
        SluiceError: NOT_FOUND when the hub does not have the model or cannot be reached.
    """
    if not models.is_hub_id(source):
        return
    loop = asyncio.get_running_loop()
    on_phase(DOWNLOADING, None)

    def report(share: float) -> None:
        loop.call_soon_threadsafe(on_phase, DOWNLOADING, share)

    patterns = {"ignore_patterns": DUPLICATE_WEIGHTS} if weights else {"allow_patterns": models.TOKENIZER_FILES}
    await asyncio.to_thread(models.download, source, tqdm_class=_progress_bar(report), **patterns)


def _progress_bar(report: Callable[[float], None]) -> type[Any]:
    """Returns a tqdm class that prints nothing and calls `report` with the fraction done, once per percent."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class NullFile:
        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            pass

    class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            self._reported_percent = -1
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": NullFile(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            done: bool | None = super().update(n)
            percent = int(100 * self.n / self.total) if self._counts_bytes and self.total else -1
            if percent > self._reported_percent:
                self._reported_percent = percent
                report(min(percent / 100, 1.0))
            return done

    return ProgressBar
