"""Parts of requests with images, and what the mock engine says of them."""

from __future__ import annotations

import base64
from hashlib import sha256
from typing import Any

from tests.support.data.images import image_file

WIDTH, HEIGHT = 64, 48
Color = tuple[int, int, int]


def picture(color: Color) -> bytes:
    """Returns a PNG of WIDTH x HEIGHT pixels of one color."""
    return image_file(WIDTH, HEIGHT, color=color)


def described(*colors: Color) -> str:
    """Returns how the mock engine's answer begins for pictures of these colors."""
    return "; ".join(described_file(picture(color)) for color in colors)


def described_file(data: bytes) -> str:
    """Returns what the mock engine's answer says of a picture."""
    return f"image {len(data)} bytes {sha256(data).hexdigest()[:8]}"


def data_url(data: bytes) -> str:
    """Returns the data URL of a PNG."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_url(color: Color) -> dict[str, Any]:
    """Returns the part of a chat message with a picture."""
    return {"type": "image_url", "image_url": {"url": data_url(picture(color))}}


def input_image(color: Color) -> dict[str, Any]:
    """Returns the part of an input item of Responses with a picture."""
    return {"type": "input_image", "image_url": data_url(picture(color))}


def user_message(*parts: Any) -> dict[str, Any]:
    """Returns a message or input item of a user."""
    return {"role": "user", "content": list(parts)}
