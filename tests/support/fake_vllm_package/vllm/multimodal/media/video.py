"""Stands in for vllm.multimodal.media.video."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm.multimodal.media import MediaWithBytes, loaded


class VideoMediaIO:
    def __init__(self, image_io: Any, num_frames: int) -> None:
        self._frames = num_frames
        self.video_loader = object()

    def load_bytes(self, data: bytes) -> MediaWithBytes:
        frames = np.tile(loaded(data)[None, :, None, None], (self._frames, 1, 1, 3))[:, ::-1]
        return MediaWithBytes((frames, {"fps": np.float64(2.5), "frames_indices": list(range(self._frames))}), data)
