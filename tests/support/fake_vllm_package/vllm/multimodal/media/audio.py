"""Stands in for vllm.multimodal.media.audio."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm.multimodal.media import loaded


class AudioMediaIO:
    def __init__(self, rate: int = 16_000) -> None:
        self._rate = rate

    def load_bytes(self, data: bytes) -> tuple[Any, float]:
        return loaded(data).astype(np.float32), self._rate
