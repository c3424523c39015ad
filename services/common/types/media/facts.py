"""What checked media files contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from math import isfinite
from typing import Any, ClassVar

from services.common.types.media.spans import MediaKind

MEDIA_TYPES = {
    "JPEG": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "WAV": "audio/wav",
    "MP3": "audio/mpeg",
    "FLAC": "audio/flac",
    "OGG": "audio/ogg",
    "MP4": "video/mp4",
    "WEBM": "video/webm",
}


def formats_of(kind: MediaKind) -> str:
    """Returns the names of the formats of a kind, for errors."""
    return ", ".join(name for name, media_type in MEDIA_TYPES.items() if media_type.startswith(f"{kind.capability}/"))


UNKNOWN_FORMAT = "is not in one of the formats"
"""The text of a BadMedia whose formats depend on the kind of the item."""


class BadMedia(Exception):
    """The file is not acceptable; the text completes the sentence "The image …", or that of another kind."""


class MediaFacts:
    """What a checked file contains.

    Attributes:
        format: a name in MEDIA_TYPES.
    """

    __slots__ = ()
    kind: ClassVar[MediaKind]
    format: str

    @property
    def media_type(self) -> str:
        """The media type of the format."""
        return MEDIA_TYPES[self.format]


@dataclass(frozen=True, slots=True)
class ImageFacts(MediaFacts):
    """What an image contains.

    Attributes:
        width, height: as shown, after the rotation that its metadata declares.
    """

    kind = MediaKind.IMAGE
    width: int
    height: int
    format: str


@dataclass(frozen=True, slots=True)
class AudioFacts(MediaFacts):
    """What a file of audio contains.

    Attributes:
        samples: number of samples of each channel.
        rate: samples a second.
    """

    kind = MediaKind.AUDIO
    samples: int
    rate: int
    format: str


@dataclass(frozen=True, slots=True)
class VideoFacts(MediaFacts):
    """What a video contains.

    Attributes:
        width, height: of a frame, in pixels.
        frames: number of frames, as engines count them.
        rate: frames a second.
        lost: those frames that the container declares and does not have.
    """

    kind = MediaKind.VIDEO
    width: int
    height: int
    frames: int
    rate: float
    format: str
    lost: int = 0


_LEAST = 1e-9
"""Below every number of a good file."""
_CLASSES: dict[str, type[MediaFacts]] = {each.kind.capability: each for each in (ImageFacts, AudioFacts, VideoFacts)}


def facts_form(facts: MediaFacts) -> dict[str, Any]:
    """Returns the JSON form of facts."""
    assert is_dataclass(facts)
    return {"kind": facts.kind.capability, **asdict(facts)}


def read_facts(form: Mapping[str, Any]) -> MediaFacts:
    """Returns the facts of a JSON form; raises KeyError, TypeError or ValueError for a malformed one.

    Its sender reads hostile files: anything may be in it.
    """
    values = dict(form)
    facts = _CLASSES[values.pop("kind")](**values)
    if not MEDIA_TYPES[facts.format].startswith(f"{facts.kind.capability}/"):
        raise ValueError("the format is one of another kind")
    for name, number in values.items():
        if name == "format":
            continue
        wanted: Any = (int, float) if name == "rate" else int
        least = 0 if name == "lost" else _LEAST
        if not isinstance(number, wanted) or isinstance(number, bool) or not isfinite(number) or number < least:
            raise ValueError(f"{name} is not a positive number")
    if isinstance(facts, VideoFacts) and facts.lost >= facts.frames:
        raise ValueError("the video has no frames")
    return facts
