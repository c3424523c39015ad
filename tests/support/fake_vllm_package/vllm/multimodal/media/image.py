"""Stands in for vllm.multimodal.media.image."""

from __future__ import annotations


class ImageMediaIO:
    def __init__(self, image_mode: str) -> None:
        self.image_mode = image_mode
