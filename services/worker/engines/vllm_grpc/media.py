"""Whether a vLLM gRPC server processes images: what it and the model's files say, and a request that proves it."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan, content_hash, png_file
from services.worker.contract.generation import GenerateRequest, MediaItem

_PROBE_SIDE = 64
"""Pixels on each side of the image of `probe`."""


def is_offered(server: Any) -> bool:
    """Returns whether a server processes images, as far as its GetServerInfo response says; probe it as well."""
    if server.kv_connector:  # a decode worker would need the images again
        return False
    return bool(server.mm_processor) and "data" in server.mm_media_ref_schemes.split(",")


def model_config(path: Path) -> dict[str, Any]:
    """Returns a model folder's config.json; empty if it has none."""
    try:
        found = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def probe(placeholder: int) -> GenerateRequest:
    """Returns a request with one white image, which only a server that processes images completes.

    Args:
        placeholder: the model's placeholder token of images.
    """
    data = png_file(_PROBE_SIDE, _PROBE_SIDE, b"\xff" * 3 * _PROBE_SIDE**2)
    digest = content_hash(data)
    packed = array("I", [placeholder]).tobytes()
    item = MediaItem(MediaSpan(MediaKind.IMAGE, digest, 0, 1, packed, 1), MediaFile(digest, data, "image/png"))
    return GenerateRequest("", "", array("I", [placeholder, 0]), media=(item,))
