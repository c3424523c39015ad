"""Random conversations with images, as clients of OpenAI's chat API send them."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image

MODES = ("RGB", "RGB", "L", "P", "RGBA", "JPEG", "rotated JPEG")
ORIENTATION, ROTATED = 0x0112, 6
WORDS = (
    "the",
    "a",
    "red",
    "small",
    "picture",
    "of",
    "some",
    "house",
    "and",
    "tree",
    "beside",
    "water",
    "what",
    "is",
    "here",
)


def picture(source: random.Random, size: tuple[int, int] | None = None) -> str:
    """A picture with random content as a data URL; without a size, of random size and format."""
    mode = "RGB" if size else source.choice(MODES)
    width, height = size or (source.randint(20, 220), source.randint(20, 220))
    coarse = Image.frombytes("RGBA", (4, 4), source.randbytes(64))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    if mode.endswith("JPEG"):
        exif = Image.Exif()
        if mode.startswith("rotated"):
            exif[ORIENTATION] = ROTATED
        image.convert("RGB").save(file, "JPEG", exif=exif)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    image.convert(mode).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def sentence(source: random.Random, count: int) -> str:
    """Some words."""
    return " ".join(source.choices(WORDS, k=count))


def image_part(url: str) -> dict[str, Any]:
    """A picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    """Text as a part of a message."""
    return {"type": "text", "text": text}


def conversation(source: random.Random, with_tool: bool) -> list[dict[str, Any]]:
    """One to four images in one to three turns; where it is asked for, the last turn is a tool's result."""
    turns: list[list[dict[str, Any]]] = [
        [text_part(sentence(source, source.randint(1, 25)))] for _ in range(source.randint(1 + with_tool, 3))
    ]
    for number in range(source.randint(1, 4)):
        parts = turns[-1] if with_tool and not number else source.choice(turns)
        parts.insert(source.randint(0, len(parts)), image_part(picture(source)))
    messages: list[dict[str, Any]] = []
    for number, parts in enumerate(turns):
        if with_tool and number == len(turns) - 1:
            messages += _tool_result(source, parts)
            continue
        if number:
            messages.append({"role": "assistant", "content": sentence(source, 6)})
        messages.append({"role": "user", "content": parts})
    return messages


def _tool_result(source: random.Random, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    return [
        {"role": "assistant", "content": sentence(source, 4), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": parts},
    ]


def conversations(count: int, seed: int) -> list[list[dict[str, Any]]]:
    """Equal for equal arguments; every third ends with images in the result of a tool."""
    source = random.Random(seed)
    return [conversation(source, number % 3 == 0) for number in range(count)]


def images_in(messages: list[dict[str, Any]]) -> int:
    """The number of images of a conversation."""
    parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
    return sum(part["type"] == "image_url" for part in parts)
