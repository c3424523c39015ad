"""Decodes the pictures of prompts as transformers does, and checks the tokens that stand for them; without torch."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from services.common.base.errors import SluiceError, invalid
from services.common.types.media.spans import MediaFile
from services.worker.contract.generation import GenerateRequest
from services.worker.engines.shared.media_prompts import unexpanded

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26
"""Pixels of a picture, of which preprocess accepts fewer by default; a larger one is refused with INVALID_ARGUMENT."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""Readers of Pillow that files can reach: those that preprocess accepts."""


def check_placeholders(request: GenerateRequest, placeholder: int) -> None:
    """Checks that every placeholder token of a prompt belongs to a media item, and every token of an item is one.

    Args:
        placeholder: The model's placeholder token. Generated tokens of a resumed request may contain it.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    unexpanded(request.token_ids, request.media, (placeholder,), request.resumed_tokens)
    for index, item in enumerate(request.media):
        span = item.span
        found = request.token_ids[span.offset : span.end].count(placeholder)
        if found != span.length:
            raise invalid(
                f"media[{index}] stands for {span.length} tokens, of which {span.length - found} are not the model's "
                f"placeholder token {placeholder}; send the tokens that preprocess returns.",
                param="media",
            )


def open_picture(file: MediaFile, most_pixels: int = MAX_PIXELS) -> Image:
    """Returns the first frame of a picture, rotated as its metadata declares, as RGB; slow.

    Raises:
        SluiceError: INVALID_ARGUMENT for a picture that cannot be decoded or has too many pixels.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(file.data), formats=FORMATS) as picture:
            if picture.width * picture.height > most_pixels:
                raise _bad(f"has {picture.width} x {picture.height} pixels; send at most {most_pixels}")
            return ImageOps.exif_transpose(picture).convert("RGB")
    except SluiceError:
        raise
    except Image.DecompressionBombError as error:
        raise _bad(f"has too many pixels; send at most {most_pixels}") from error
    except Exception as error:  # decoders raise many types for broken files
        raise _bad("cannot be decoded; send a complete PNG, JPEG, WebP, GIF or BMP file") from error


def _bad(what: str) -> SluiceError:
    return invalid(f"A picture {what}.", param="media", code="invalid_media")
