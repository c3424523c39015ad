"""Chats with one to three clips of audio or videos, for engines and for preprocess."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any

from services.common.types.media.facts import MEDIA_TYPES
from services.common.types.media.spans import MediaKind, content_hash
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.media.clips.files import check_clip
from services.preprocess.media.expansion import CountedItem
from services.preprocess.media.limits import ClipLimits
from tests.engines.image_conversations import sentence, text_part
from tests.support.data.clips import audio_file, video_file

AUDIO_FORMATS, VIDEO_FORMATS = ("WAV", "MP3", "FLAC", "OGG"), ("MP4", "WEBM")
AUDIO_RATES = (8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000)
VIDEO_RATES = (5, 10, Fraction(24_000, 1001), 25, Fraction(30_000, 1001), 60)
LONG_S = 30.2
"""Seconds of a clip that is longer than what models use."""


@dataclass
class MediaChat:
    """A chat in the form of OpenAI's clients, and the same for preprocess."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    numbered: list[dict[str, Any]] = field(default_factory=list)
    items: list[CountedItem] = field(default_factory=list)
    files: list[bytes] = field(default_factory=list)

    @property
    def request(self) -> ChatRequest:
        """What preprocess gets."""
        return ChatRequest(self.numbered)

    def add(self, role: str, parts: list[str | bytes]) -> None:
        """Adds a message of texts and files."""
        theirs, ours = [], []
        for part in parts:
            if isinstance(part, str):
                theirs.append(text_part(part))
                ours.append(text_part(part))
                continue
            item = CountedItem("messages[0].content[0]", content_hash(part), check_clip(part, ClipLimits()))
            theirs.append(media_part(item, part))
            ours.append({"type": item.kind.capability, "media": len(self.items)})
            self.items.append(item)
            self.files.append(part)
        self.messages.append({"role": role, "content": theirs})
        self.numbered.append({"role": role, "content": ours})


def media_part(item: CountedItem, data: bytes) -> dict[str, Any]:
    """A clip as a part of a message."""
    text = base64.b64encode(data).decode()
    if item.kind is MediaKind.AUDIO:
        return {"type": "input_audio", "input_audio": {"data": text, "format": item.facts.format.lower()}}
    url = f"data:{MEDIA_TYPES[item.facts.format]};base64,{text}"
    return {"type": "video_url", "video_url": {"url": url}}


def clip(random: Random, kind: MediaKind, number: int) -> bytes:
    """A clip of any length, rate and format; every 25th audio is longer than 30 seconds."""
    if kind is MediaKind.AUDIO:
        form = AUDIO_FORMATS[number % len(AUDIO_FORMATS)]
        seconds = LONG_S if number % 25 == 7 else random.choice((0.06, 0.5, 3.0)) * (1 + random.random())
        rate, channels = random.choice(AUDIO_RATES), random.randint(1, 2)
        return audio_file(seconds, form, rate, channels, pitch=random.uniform(100, 1_000))
    form = VIDEO_FORMATS[number % len(VIDEO_FORMATS)]
    width, height = (2 * random.randint(8, 150) for _ in range(2))
    color = (random.randint(0, 255), random.randint(0, 255), random.randint(0, 255))
    return video_file(width, height, random.randint(2, 120), form, random.choice(VIDEO_RATES), color)


def media_chats(kind: MediaKind, clips: int, seed: int) -> list[MediaChat]:
    """Chats with so many clips in all; equal for equal arguments."""
    random, made, found = Random(seed), 0, []
    while made < clips:
        chat = MediaChat()
        for turn in range(random.randint(1, 2)):
            if turn:
                chat.add("assistant", [sentence(random, 5)])
            count = min(random.randint(1, 2), clips - made)
            parts: list[str | bytes] = [clip(random, kind, made + number) for number in range(count)]
            made += count
            parts.insert(random.randint(0, len(parts)), sentence(random, random.randint(1, 20)))
            chat.add("user", parts)
        found.append(chat)
    return found
