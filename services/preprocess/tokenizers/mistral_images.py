"""Which tokens stand for an image of a Mistral model, by the size of the image.

mistral-common scales and normalizes the pixels as well, for which it needs OpenCV; preprocess only needs the tokens.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoding, SpecialImageIDs

from services.preprocess.contract.tokenizer import ImageRule, Message

IMAGE_PART: Message = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
"""An image in the form that mistral-common reads; its file is not looked at."""


class MistralImages(ImageRule):
    """The rule, which stands in for mistral-common's encoder of images: one token is an image until it is expanded."""

    def __init__(self, config: ImageConfig, special_ids: SpecialImageIDs) -> None:
        self.token_id = special_ids.img
        self._special_ids = special_ids
        self._most = config.max_image_size
        self._side = config.image_patch_size * config.spatial_merge_size
        self.image_config = self.mm_config = config

    @classmethod
    def take_over(cls, instruct: Any) -> MistralImages | None:
        """Replaces the encoder of images of an instruct tokenizer; None if that has none."""
        encoder = getattr(instruct, "image_encoder", None)
        if encoder is None:
            return None
        rule = cls(encoder.image_config, encoder.special_ids)
        instruct.image_encoder = rule
        return rule

    @property
    def special_ids(self) -> SpecialImageIDs:
        """The ids of the tokens, as mistral-common's encoder has them."""
        return self._special_ids

    @property
    def image_token(self) -> int:
        """The id of the token of a patch, as mistral-common's encoder has it."""
        return self.token_id

    def __call__(self, content: Any) -> ImageEncoding:
        """Returns one token for an image."""
        return ImageEncoding(tokens=[self.token_id], image=np.zeros((3, 1, 1)))

    def ids(self, width: int, height: int) -> array[int]:
        ratio = max(width, height) / self._most
        if ratio > 1:
            width, height = (max(round(side / ratio), 1) for side in (width, height))
        columns, rows = ((side - 1) // self._side + 1 for side in (width, height))
        ids = array("I", [self._special_ids.img] * columns + [self._special_ids.img_break]) * rows
        ids[-1] = self._special_ids.img_end
        return ids
